"""The GPUs of a run, from arguments of accelerate, torchrun and deepspeed, and from the environment's variables."""

from __future__ import annotations

import re

from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.rules import Rule, needless, taken, worked_out

NOT_SPLIT = "no such parallelism; the batch stays the same"
# Arguments that count the GPUs of one node, and the nodes.
OF_ONE_NODE = ("NPROC_PER_NODE", "actor_num_gpus_per_node", "nproc_per_node")
OF_NODES = ("NNODES", "actor_num_nodes", "num_machines")
OF_A_NODE = 8  # GPUs, where --gpus says more than one node has
ONE_NODE = "there is one, or --gpus says how many GPUs there are"
COUNTED = "another argument, or --gpus, says how many GPUs there are"
STARTS = "it tells the launcher how to start; `python -m rlexp` starts its own ranks"

RULES: tuple[Rule, ...] = (
    worked_out("nproc_per_node num_gpus", "launch.nproc", "GPUs of one machine (torchrun, deepspeed)", COUNTED),
    worked_out("include", "launch.nproc", "deepspeed: localhost:4,5 are two GPUs", COUNTED),
    worked_out("num_machines nnodes num_nodes", "launch.nodes", "", ONE_NODE),
    needless("module hostfile master_port master_addr address runtime-env-json working-dir node_rank rdzv_backend "
             "rdzv_endpoint standalone", STARTS),
    # variables of the environment
    worked_out("CUDA_VISIBLE_DEVICES", "launch.nproc", "the GPUs that it lists, if nothing else gives their number",
               COUNTED),
    taken("WANDB_PROJECT", "logger.project"),
    taken("WANDB_ENTITY", "logger.entity"),
    taken("WANDB_NAME", "logger.run_name"),
    needless("MASTER_PORT MASTER_ADDR NODE_RANK RANK LOCAL_RANK WORLD_SIZE PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS "
             "TOKENIZERS_PARALLELISM", STARTS),
)  # fmt: skip


def ranks(conv: Conversion) -> int | None:
    """Set the ranks and return how many GPUs there are in all; None if nothing says it."""
    nodes = next((name for name in OF_NODES if conv.name(name)), OF_NODES[-1])
    several, by_nodes, why = conv.whole(nodes, 1, least=1), [nodes], ""
    named = next((name for name in OF_ONE_NODE if conv.name(name)), None)
    if conv.gpus is not None:
        gpus, by, why = conv.gpus, "", "--gpus"
        if conv.name(nodes) is None and gpus > OF_A_NODE and gpus % OF_A_NODE == 0:
            several, by_nodes, why = gpus // OF_A_NODE, [], f"--gpus={gpus}"
            conv.notes.append(f"GPUs: --gpus={gpus} is taken for {several} nodes of {OF_A_NODE}. For others, set "
                              f"launch.nodes and launch.nproc.")  # fmt: skip
        elif conv.name(nodes) is None and gpus > OF_A_NODE:
            conv.notes.append(f"GPUs: --gpus={gpus} is taken for one node. For several, set launch.nodes and "
                              f"launch.nproc.")  # fmt: skip
        _divides("--gpus", gpus, several)
    elif conv.name("num_processes") is not None:
        gpus, by = conv.whole("num_processes", 1, least=1), "num_processes"
        _divides(by, gpus, several)
    elif named is not None:
        gpus, by = conv.whole(named, 1, least=1) * several, named
    elif conv.name("include") is not None:
        (gpus, several), by = _included(conv.text("include")), "include"
    elif conv.name("CUDA_VISIBLE_DEVICES") is not None:
        listed = conv.text("CUDA_VISIBLE_DEVICES", "0").split(",")
        gpus, by = len([each for each in listed if each.strip()]) * several, "CUDA_VISIBLE_DEVICES"
    else:
        return None
    conv.put("launch.nproc", max(1, gpus // several), *filter(None, [by]), why=why)
    if several > 1:
        conv.put("launch.nodes", several, *by_nodes, why="" if by_nodes else why)
    return max(1, gpus)


def _divides(name: str, gpus: int, nodes: int) -> None:
    if gpus % nodes:
        raise ConvertError(f"{name}={gpus}: is no multiple of the {nodes} nodes. Give all GPUs of the run: --gpus=N.")


def _included(text: str) -> tuple[int, int]:
    """Return the GPUs and the nodes of deepspeed's `host:0,1@host2:0,1`."""
    hosts = [each.partition(":")[2] for each in text.split("@")]
    counts = [len(re.findall(r"\d+", each)) for each in hosts]
    if not all(counts):
        raise ConvertError(f"include={text}: does not list the GPUs of each host. Say how many in all: --gpus=8.")
    return sum(counts), len(hosts)


def spread(conv: Conversion, gpus: int, *sizes: str) -> int:
    """Return over how many GPUs theirs spreads a batch, where it splits a model over some of them."""
    for name in sizes:
        gpus //= int(conv.whole(name, 1, least=1))
    return max(1, gpus)


def needed(conv: Conversion) -> int:
    """Set the ranks and return the GPUs, without which the batch of a step is not known."""
    if (gpus := ranks(conv)) is None:
        batch = conv.spelled("per_device_train_batch_size")
        raise ConvertError(f"{batch}: is the batch of one GPU, and the file does not say how many GPUs there are. "
                           f"Say how many: --gpus=8.")  # fmt: skip
    return gpus
