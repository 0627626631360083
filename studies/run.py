"""``python -m studies.run [NAME...]``: do what is missing of these studies, or of all."""

import argparse
from functools import partial
from importlib import import_module

from studies.harness import RESULTS, WORKERS, Study, in_processes, load, missing, report, run

NAMES = [
    "heterogeneous",
    "compression",
    "merge",
    "overlap",
    "clip",
    "gossip_one_step",
    "gossip_local_steps",
    "gossip_bandwidth",
    "bytes_language",
    "bytes_learners",
    "bytes_vision",
    "quality_under_failure",
]


def study_of(name: str) -> Study:
    study: Study = import_module(f"studies.{name}").STUDY
    return study


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without a name")
    parser.add_argument("--report", action="store_true", help="only write pages and pictures again")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes, a cell each")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"no study {name!r}: there are {', '.join(NAMES)}")
    for name in options.names or NAMES:
        study = study_of(name)
        if options.report:
            left = len(missing(study, load(study, RESULTS)))
            print(f"{name}: {left} cells are missing, its page stays as it is") if left else report(study)
        else:
            run(study, do=partial(in_processes, workers=options.workers))


if __name__ == "__main__":
    main()
