"""A web page over run folders, in which the group is the unit, and a workbench for the objective. No torch at import.

`server.application(library, token, port)` is the Starlette application; `library.Library` knows which runs it may show.
Every number on a page comes from the run folder or from `gropius.objective`; nothing is recomputed in the browser.
"""
