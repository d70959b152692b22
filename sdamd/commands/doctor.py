"""`sdamd doctor`: find what keeps the GPU from working, and what helps."""

import argparse
import json
import os
import sys
from pathlib import Path

import sdamd
from sdamd.hardware import doctor, report
from sdamd.hardware.survey import survey
from sdamd.settings import Settings


def run(asked: argparse.Namespace) -> int:
    """Find what keeps the GPU from working, here or on a recorded machine, and what helps."""
    here = asked.root == Path("/")
    found = survey(asked.root, asked.platform, home=Settings.load().home if here else None)

    def environment() -> dict[str, str]:
        from sdamd.studio import Studio  # noqa: PLC0415  # only where a child is asked

        studio = Studio(Settings.load(), detection=found.detection)
        return {**os.environ, **studio.worker_environment()}

    found = doctor.ask(found, environment, probe=asked.probe, selftest=asked.selftest)
    pasted = asked.explain or ""
    if pasted == "-":
        pasted = sys.stdin.buffer.read().decode("utf-8", "replace")
    diagnosis = doctor.diagnose(found, pasted)
    if asked.report is not None:
        private = report.private_of(os.environ)
        text = report.report(diagnosis, sdamd.__version__, private, asked.root, pasted)
        print(report.save_report(text, asked.report))
    elif asked.json:
        print(json.dumps(diagnosis.to_dict()))
    else:
        print("\n".join(doctor.lines(diagnosis)))
    return 3 if diagnosis.faulty else 0
