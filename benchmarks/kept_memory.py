"""What it gains on a CPU that freed memory is kept (`equicam.runtime.executor`): the same calls in processes with and without.

    python benchmarks/kept_memory.py [--networks mobilenet_v2 resnet50] [--images 8] [--rounds 3]

18 views of 224×224 with PEUM, random weights. An environment variable that begins with MALLOC_ leaves malloc as it is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

TIMED = """
import json, resource, statistics, sys, time
import torch, torchvision
import equicam

network, images, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = equicam.wrap(getattr(torchvision.models, network)().eval(), example=torch.zeros(1, 3, 224, 224))
x, seconds = torch.randn(images, 3, 224, 224), []
for _ in range(1 + rounds):
    start = time.perf_counter()
    equicam.explain(model, x)
    seconds.append(time.perf_counter() - start)
print(json.dumps([statistics.median(seconds[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["mobilenet_v2", "resnet50"])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    usual = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    print("| network | kept, s | given back, s | kept, of given back | peak memory, MB |")
    print("|---|---|---|---|---|")
    for network in given.networks:
        found: list[list[list[float]]] = [[], []]
        for _ in range(2):  # in turn, so that a noisy machine disturbs both alike
            for kept, env in zip(found, (usual, usual | {"MALLOC_ARENA_TEST": "8"}), strict=True):
                command = [sys.executable, "-c", TIMED, network, str(given.images), str(given.rounds)]
                kept.append(
                    json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
                )
        (kept, kept_mb), (back, back_mb) = (map(statistics.mean, zip(*one, strict=True)) for one in found)
        print(
            f"| {network} | {kept:.2f} | {back:.2f} | {kept / back:.2f} | {kept_mb:,.0f}, {back_mb:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
