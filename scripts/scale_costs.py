"""The cost of a large audit, computed from measured rates: the table of docs/scale.md.

python scripts/scale_costs.py --rate 700 --decode 130

Defaults that are not assumptions are measured: `--stored-kb`, `--driver-kb`, `--list-rate` and `--triage-kb` by benchmarks/million.py.
"""

import argparse
from dataclasses import dataclass

HOUR = 3600


@dataclass(frozen=True)
class Costs:
    """A number of tiles on a number of GPUs."""

    gpu_hours: float
    hours: float  # of wall time
    decode_cores_per_gpu: float
    read_gbit_per_s: float
    stored_tb: float
    read_tb: float
    shards: int
    events_per_s: float  # of the log, one a shard
    driver_gb: float
    listing_minutes: float
    triage_gb: float


def costs(
    *, tiles: int, gpus: int, rate: float, efficiency: float, decode: float, tile_kb: float, stored_kb: float, shard: int,
    driver_kb: float, list_rate: float, triage_kb: float,
) -> Costs:  # fmt: skip
    """Rates in images a second: `rate` of one GPU, `decode` of one CPU core; `efficiency` of many GPUs to one."""
    effective = rate * efficiency
    gpu_seconds = tiles / effective
    return Costs(
        gpu_hours=gpu_seconds / HOUR,
        hours=gpu_seconds / gpus / HOUR,
        decode_cores_per_gpu=effective / decode,
        read_gbit_per_s=effective * gpus * tile_kb * 8 / 1e6,
        stored_tb=tiles * stored_kb / 1e9,
        read_tb=tiles * tile_kb / 1e9,
        shards=-(-tiles // shard),
        events_per_s=effective * gpus / shard,
        driver_gb=tiles * driver_kb / 1e6,
        listing_minutes=tiles / list_rate / 60,
        triage_gb=tiles * triage_kb / 1e6,
    )


def main() -> None:
    """Print the rows of the table, as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", required=True, help="images/s of one GPU, one or more"
    )
    parser.add_argument("--decode", type=float, required=True, help="images/s that one CPU core decodes")
    parser.add_argument("--tiles", type=int, default=100_000_000)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--efficiency", type=float, default=0.9, help="of many GPUs to one")
    parser.add_argument("--tile-kb", type=float, default=20, help="kB read a tile")
    parser.add_argument("--stored-kb", type=float, default=2.1, help="kB written an image")
    parser.add_argument("--shard", type=int, default=1024, help="images in a shard")
    parser.add_argument("--driver-kb", type=float, default=0.15, help="kB of the driver's memory an image")
    parser.add_argument(
        "--list-rate", type=float, default=300_000, help="images a second that one core lists"
    )
    parser.add_argument("--triage-kb", type=float, default=1.2, help="kB of memory of triage an image")
    given = parser.parse_args()
    same = {name: value for name, value in vars(given).items() if name != "rate"}
    print(
        "| images/s a GPU | GPU-hours | hours on",
        given.gpus,
        "GPUs | decode cores a GPU | read Gbit/s | read TB | stored TB | shards | log events/s | driver GB | listing min | triage GB |",
    )
    print("|---" * 12 + "|")
    for rate in given.rate:
        c = costs(rate=rate, **same)
        print(
            f"| {rate:,.0f} | {c.gpu_hours:,.0f} | {c.hours:,.1f} | {c.decode_cores_per_gpu:.1f} | {c.read_gbit_per_s:.2f} "
            f"| {c.read_tb:.1f} | {c.stored_tb:.2f} | {c.shards:,} | {c.events_per_s:.0f} | {c.driver_gb:.0f} "
            f"| {c.listing_minutes:.0f} | {c.triage_gb:.0f} |"
        )


if __name__ == "__main__":
    main()
