"""vLLM behind the `Engine` protocol: an engine in the trainer, a worker beside it, and what passes between them.

    engine.py   the trainer's side: requests, hand-over of weights, deadlines, last words
    probe.py    after a hand-over: does the engine give a token the trainer's log-probability?
    place.py    where the worker runs: a process of another interpreter, a thread, or a server somebody started
    wire.py     messages; weights.py  tensors through shared memory
    worker.py   the worker's side, for anything that draws; core.py  vLLM itself; program.py  started by its interpreter

The worker's side needs torch and NumPy and nothing else of this package's requirements, so that vLLM may live in an
environment of its own. Only `core.py` imports vllm.
"""
