"""A worker's program for tests: vLLM with a fault, named by GROPIUS_FAULT, that shows at the second hand-over.

head        the packed copy of a tied head is not renewed
prefixes    cached keys and values of the old weights are not dropped
"""

import importlib.util
import os

found = importlib.util.spec_from_file_location("program", os.environ["GROPIUS_PROGRAM"])
program = importlib.util.module_from_spec(found)
found.loader.exec_module(program)  # makes the package importable


def make_core(start):
    from gropius.rollout.vllm.core import VllmCore

    class Stale(VllmCore):
        heads = 0

        def refresh_tied_heads(self):
            self.heads += 1
            if self.heads == 1 or os.environ["GROPIUS_FAULT"] != "head":
                super().refresh_tied_heads()

        def drop_prefixes(self):
            if os.environ["GROPIUS_FAULT"] != "prefixes":
                super().drop_prefixes()

    return Stale(start)


if __name__ == "__main__":
    program.serve(make_core)
