"""The rules of `doctor`, a row of data each; `RULES` has them all."""

from sdamd.hardware.rules import builds, errors, kernels, machine, place, rights
from sdamd.hardware.rules.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *place.RULES,
            *machine.RULES,
            *rights.RULES,
            *kernels.RULES,
            *builds.RULES,
            *errors.RULES,
        ),
        key=lambda rule: rule.number,
    )
)
"""By number. 1 to 44 are the table of public bug reports that sdamd was made after."""
