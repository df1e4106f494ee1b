"""`python -m gropius` is `gropius`."""

from gropius.cli.main import main

if __name__ == "__main__":
    main()
