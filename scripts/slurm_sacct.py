#!/usr/bin/env python3
"""A substitute for `sacct` on the Slurm bed, which has no accounting daemon.

submitit polls the state of its jobs by `sacct -o JobID,State,NodeList --parsable2 -j JOB ...`, and
waits forever if that fails. This script answers only that command, from `scontrol show job`, which
remembers a job for `MinJobAge` seconds after its end.
"""

import re
import subprocess
import sys
from itertools import pairwise


def job_id(fields: dict[str, str]) -> str:
    """The id as sacct writes it: ARRAY_TASK for an array task, ARRAY_[TASKS] while it waits."""
    task = fields.get("ArrayTaskId")
    if task is None:
        return fields["JobId"]
    return f"{fields['ArrayJobId']}_{task if task.isdigit() else f'[{task}]'}"


def main(arguments: list[str]) -> None:
    """Prints a line for each job that scontrol knows."""
    print("JobID|State|NodeList")
    jobs = [value for flag, value in pairwise(arguments) if flag == "-j"]
    for job in jobs:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in shown.stdout.splitlines():
            fields = dict(re.findall(r"(\w+)=(\S*)", line))
            if "JobId" in fields:
                print(f"{job_id(fields)}|{fields['JobState']}|{fields.get('NodeList', '')}")


if __name__ == "__main__":
    main(sys.argv[1:])
