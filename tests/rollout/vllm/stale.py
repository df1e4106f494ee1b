"""A worker's program for tests: vLLM, its tied head refreshed at the first hand-over and forgotten at later ones."""

import importlib.util
import os

found = importlib.util.spec_from_file_location("program", os.environ["GROPIUS_PROGRAM"])
program = importlib.util.module_from_spec(found)
found.loader.exec_module(program)  # makes the package importable


def make_core(start):
    from gropius.rollout.vllm.core import VllmCore

    class Stale(VllmCore):
        loads = 0

        def refresh_tied_heads(self):
            self.loads += 1
            if self.loads == 1:
                super().refresh_tied_heads()

    return Stale(start)


if __name__ == "__main__":
    program.serve(make_core)
