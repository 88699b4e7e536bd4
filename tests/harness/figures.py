"""The figures of README.md that come from the evidence in logs/.

    python3 tests/harness/figures.py [DIR]

writes the table of errors into README.md, from the npu_result.json of DIR, by default of logs/.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- error:begin -->\n", "<!-- error:end -->"


def error_section(result: dict[str, Any]) -> str:
    """What stands between the two marks: the run, and a row for each output."""
    reference = result["reference"]
    kind = "simulated" if result["simulated"] else "physical"
    rows = "1 observation" if result["rows"] == 1 else f"{result['rows']} observations"
    within = "each below 1 %" if reference["within_1_percent"] else "not all below 1 %"
    kernels = sum(result["kernels"].values())
    checkpoint, torch_npu = result["checkpoint"]["sha256"][:16], result["versions"]["torch_npu"]
    agreement = f"equal in {100 * reference['action_agreement']:.4g} % of the rows, {reference['ties']} ties"
    lines = [
        f"The run in `logs/` is **{kind}**: {result['npu_device_name']}, {result['started_at'][:10]}, torch_npu "
        f"{torch_npu},",
        f"checkpoint `{checkpoint}...`, {rows}, {kernels} kernels a forward. Errors, {within}:",
        "",
        "| output | first answer | largest error | largest relative error | mean error | cosine |",
        "|---|---|---|---|---|---|",
        f"| `action` | `{json.dumps(result['action'][0])}` | {agreement} | | | |",
    ]
    if "action" in reference["outputs"]:  # of a Box: numbers like the others
        lines.pop()
    for name, errors in reference["outputs"].items():
        cosine = "" if errors["cosine"] is None else f"{errors['cosine']:.9f}"
        lines.append(
            f"| `{name}` | `{json.dumps(result[name][0])}` | {errors['max_abs_error']:.1e} | "
            f"{errors['max_rel_error_percent']:.1e} % | {errors['mean_abs_error']:.1e} | {cosine} |")
    return "\n".join(["", *lines, "", ""])


def main() -> int:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PROJECT / "logs"
    result = json.loads((directory / "npu_result.json").read_text(encoding="utf-8"))
    if result["exit_code"] != 0:
        print(f"figures.py: the run in {directory} failed: it has no figures", file=sys.stderr)
        return 1
    page = PROJECT / "README.md"
    text = page.read_text(encoding="utf-8")
    section = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(section.sub(lambda _: BEGIN + error_section(result) + END, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
