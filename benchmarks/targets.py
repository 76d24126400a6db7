"""Are the targets met? `python benchmarks/targets.py FOLDER` reads what was measured.

It joins `bandwidth_N.json` and `fsdp2_N.json` of a folder, and writes `targets_N.json`.
Native is what is fastest of one psum_scatter per leaf, all of them in one NCCL group,
and one of all leaves concatenated. FSDP2 adds to nothing, but stores float32 shards, so
it stands beside float32 accumulators. Missed targets are found, not failures: the exit
code is 1 only if nothing was measured.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Sequence

from bus import Row

from jaxzero._cli.bench.table import table

NATIVE = ("per leaf", "one group", "concatenated")
OF_FLAT = 0.95
"""At least this of the limit's bandwidth, for trees of more than `LARGE_MB`."""
LARGE_MB = 256
TIMES_NATIVE = {"gpt2": 1.3}
"""At least so many times as fast as native; other trees: not slower."""
ALL_ROWS = 12
"""Three trees, two dtypes on the wire, two kinds of results."""


def targets(bandwidth: Sequence[Row], fsdp2: Sequence[Row]) -> list[Row]:
    """Returns a row per tree, wire and kind of result; "misses" is "-" if all is met.

    Args:
      bandwidth: rows of `bandwidth.py`.
      fsdp2: rows of `fsdp2.py`, or none.
    """
    by_key = {
        (row["tree"], row["wire"], row["into"], row["how"]): row
        for row in (*bandwidth, *fsdp2)
    }
    found = []
    for ours in bandwidth:
        if ours["how"] != "jaxzero":
            continue
        key = ours["tree"], ours["wire"], ours["into"]
        native, fastest = min((by_key[*key, how]["ms"], how) for how in NATIVE)
        row: Row = {
            "tree": ours["tree"],
            "MB": ours["MB"],
            "ranks": ours["ranks"],
            "wire": ours["wire"],
            "into": ours["into"],
            "GB/s": ours["GB/s"],
            "float32 sums": by_key[*key, "jaxzero, float32 sums"]["GB/s"],
            "of flat": ours["of flat"],
            "x native": native / ours["ms"],
            "native": fastest,
            "x FSDP2": by_key.get((*key, "FSDP2"), {"ms": math.nan})["ms"] / ours["ms"],
        }
        found.append(row | {"misses": ", ".join(misses(row)) or "-"})
    return found


def misses(row: Row) -> list[str]:
    """Returns the targets that a row does not meet."""
    least = TIMES_NATIVE.get(row["tree"], 1.0)
    wanted = {
        f"{OF_FLAT} of flat": row["MB"] <= LARGE_MB or row["of flat"] >= OF_FLAT,
        f"{least} x native": row["x native"] >= least,
    }
    return [target for target, met in wanted.items() if not met]


def verdict(rows: Sequence[Row]) -> str:
    """Returns how many rows miss a target, and whether some are not there at all."""
    missed = sum(row["misses"] != "-" for row in rows)
    text = f"{missed} of {len(rows)} rows miss a target"
    if len(rows) < ALL_ROWS:
        text += f"; {ALL_ROWS - len(rows)} were not measured"
    return text


def main() -> None:
    """Reads, joins, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    folder: pathlib.Path = parser.parse_args().folder
    paths = sorted(folder.glob("bandwidth_*.json"))
    if not paths:
        raise SystemExit(f"{folder} has no bandwidth_*.json of benchmarks/bandwidth.py")
    for path in paths:
        ranks = path.stem.removeprefix("bandwidth_")
        measured = json.loads(path.read_text())
        rival = folder / f"fsdp2_{ranks}.json"
        fsdp2 = json.loads(rival.read_text())["rows"] if rival.exists() else []
        rows = targets(measured["rows"], fsdp2)
        print(table(rows))
        print(f"{ranks} ranks: {verdict(rows)}", end="\n\n")
        for row in rows:
            if math.isnan(row["x FSDP2"]):  # JSON has no such number
                row["x FSDP2"] = None
        report = {"environment": measured["environment"], "rows": rows}
        target = folder / f"targets_{ranks}.json"
        target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
