"""The examples for clusters say what runs: command lines are read, recipes resolved, and the numbers agree."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gropius.recipe import resolve
from gropius.recipe.resolve import Resolved

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
STUBS = {
    "torchrun": 'printf "%s\\n" "$@" > "$SAID"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "printf 'first\\nsecond\\n'",
    "hostname": 'echo "10.0.0.$NODE 192.168.0.9"',
}


def option(words: list[str], name: str) -> str:
    """The value of `--name=value` or `--name value`."""
    for n, word in enumerate(words):
        if word == f"--{name}":
            return words[n + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    raise AssertionError(f"no --{name} in {words}")


def recipe_of(words: list[str], recipe: str) -> Resolved:
    """The recipe with the settings of a command line, as `gropius train` reads them."""
    settings = [word.partition("=")[2] for word in words if word.startswith("--set=")]
    settings += [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    return resolve(FOLDER.parents[1] / recipe, settings)


def dry(file: str, tmp_path: Path, node: int = 1) -> tuple[str, list[str]]:
    """A script's text, and the words that it starts torchrun with on a node, all programs but the shell replaced."""
    said = tmp_path / "said"
    for name, line in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said), "NODE": str(node),
                   "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7"}  # fmt: skip
    run = ["bash", str(FOLDER / file)]
    ran = subprocess.run(run, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return (FOLDER / file).read_text(), said.read_text().splitlines()


@pytest.mark.parametrize("file", ["torchrun.sh", "slurm.sbatch"])
def test_a_script_starts_as_many_ranks_as_its_recipe_asks_for(file: str, tmp_path: Path) -> None:
    text, words = dry(file, tmp_path)
    resolved = recipe_of(words, words[words.index("train") + 1])
    assert resolved.cluster.trainer_ranks == int(option(words, "nnodes")) * int(option(words, "nproc-per-node"))
    assert words[words.index("-m") + 1] == "gropius"
    if file.endswith("sbatch"):
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
        assert asked["nodes"] == option(words, "nnodes") and asked["gpus-per-node"] == option(words, "nproc-per-node")
        assert asked["ntasks-per-node"] == "1" and resolved.cluster.bind == "10.0.0.1"
        assert option(words, "rdzv-endpoint") == "first:29500" and resolved.checkpoint.every > 0
        other = dry(file, tmp_path, node=2)[1]
        assert recipe_of(other, words[words.index("train") + 1]).cluster.bind == "10.0.0.2"  # each node's own


def test_the_kubernetes_job_starts_as_many_ranks_as_its_recipe_asks_for() -> None:
    yaml = pytest.importorskip("yaml")
    service, secret, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert (service["kind"], secret["kind"], job["kind"]) == ("Service", "Secret", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    resolved = recipe_of(words, words[words.index("train") + 1])
    ranks = int(option(words, "nnodes")) * int(option(words, "nproc-per-node"))
    assert resolved.cluster.trainer_ranks == ranks
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(option(words, "nnodes"))
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == option(words, "nproc-per-node")
    host = option(words, "rdzv-endpoint").partition(":")[0]
    assert host == f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
    assert resolved.checkpoint.every > 0 and resolved.out == "/runs"


def test_the_ray_job_has_a_gpu_for_each_rank_and_engine() -> None:
    yaml = pytest.importorskip("yaml")
    secret, job = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
    assert (secret["kind"], job["kind"], job["apiVersion"]) == ("Secret", "RayJob", "ray.io/v1")
    words = shlex.split(job["spec"]["entrypoint"])
    resolved = recipe_of(words, words[words.index("train") + 1])
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(group["rayStartParams"]["num-gpus"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert resolved.cluster.trainer_ranks + resolved.cluster.engines == group["replicas"] * gpus
    given = {one["name"] for one in container["env"]}
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "GROPIUS_SECRET"} <= given
    assert option(words, "cluster") == "auto" and resolved.checkpoint.every > 0 and resolved.out == "/runs"
