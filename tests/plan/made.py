"""Jobs for plans: of a family, with what a test is about."""

from typing import Any

from sdamd.batch import expand
from sdamd.checkpoint import FAMILIES
from sdamd.request import Job, Request


def a_job(family: str, **asked: Any) -> Job:
    return next(expand(Request(seed=1, **asked), FAMILIES[family]))
