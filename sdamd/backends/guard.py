"""Runs out of memory and goes on: the calls of a pipeline's components, made again more frugally.

The UNet, the VAE and the text encoders are functions of their inputs alone. So a call that fails
for want of memory can be made again, with the same inputs and in a cheaper way, and whoever called
it never knows: sampling goes on in mid-step, and no latents are lost.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from sdamd.backends.backend import Measured, Outcome
from sdamd.backends.device_memory import DeviceMemory
from sdamd.errors import OutOfVram
from sdamd.out_of_memory import in_words, needed_bytes, ran_out
from sdamd.plan import Plan, Stage, Verdict, more_frugal

log = logging.getLogger(__name__)

TEXT: Final = ("text_encoder", "text_encoder_2", "image_encoder")
DOING: Final[Mapping[str, str]] = {
    Stage.TEXT: "reading the prompt",
    Stage.ENCODE: "encoding the first picture",
    Stage.DENOISE: "denoising",
    Stage.HIRES: "denoising the enlarged picture",
    Stage.DECODE: "decoding the picture",
    Stage.LOAD: "loading the weights",
}
"""What a person is told of a stage."""


@dataclass(slots=True)
class Account:
    """What a stage has taken until now; see `Measured`."""

    bytes: int | None = None
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Guard:
    """One run's: the plan that is in force, and what the stages took.

    Args:
        plan: how to start, and then how it goes on.
        apply: switches the pipeline to a plan, in the middle of a step too.
        memory: the device's.
        base: (height, width) of the first pass's latents.
        on_cpu: what decodes latents at the very end of the ladder, to pixels on the CPU.
        fell: the stages in which memory ran out, once for each time. What they took after that is
            not measured, since it was another plan's.
    """

    plan: Plan
    apply: Callable[[Plan], None]
    memory: DeviceMemory
    base: tuple[int, int]
    on_cpu: Callable[[torch.Tensor], torch.Tensor] | None = None
    fell: list[str] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    decoded_on_cpu: bool = False
    _stage: str = ""
    _since: float = 0.0
    _inside: bool = False

    @contextmanager
    def over(self, pipe: Any) -> Iterator[None]:
        """Bring a pipeline under the plan, and stand over its components' calls for one run.

        Weights that find no room take a cheaper plan at once.

        Args:
            pipe: any pipeline of diffusers with `unet` and `vae`.

        Raises:
            OutOfVram: a component ran out of memory in the most frugal way, too.
        """
        fits = self.plan.verdict is not Verdict.DOES_NOT_FIT
        self.memory.limit(self.plan.budget_bytes if fits else None)
        self._switch(self.plan)
        with ExitStack() as taken_off:
            for component, method, wrapper in self._wrappers(pipe):
                taken_off.enter_context(_over(component, method, wrapper))
            try:
                yield
            finally:
                self.enter("")

    def _wrappers(self, pipe: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for name in TEXT:
            if (encoder := getattr(pipe, name, None)) is not None:
                yield encoder, "forward", partial(self.call, Stage.TEXT)
        yield pipe.unet, "forward", self.denoise
        if (control := getattr(pipe, "controlnet", None)) is not None:
            yield control, "forward", self.denoise
        yield pipe.vae, "decode", self.decode
        yield pipe.vae, "encode", partial(self.call, Stage.ENCODE)
        # A picture that overflowed is decoded again so; what is wide already stays at a retry.
        yield pipe.vae, "float", partial(self.call, Stage.DECODE)

    @property
    def outcome(self) -> Outcome:
        """How the run went until now."""
        measured = {
            stage: Measured(bytes=each.bytes, seconds=each.seconds)
            for stage, each in self.accounts.items()
        }
        return Outcome(
            plan=self.plan, fell=tuple(self.fell), measured=measured, on_cpu=self.decoded_on_cpu
        )

    def call(self, stage: str, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Give what `inner` gives, under the first plan from this one down that has room for it.

        Raises:
            OutOfVram: there is none.
        """
        if self._inside:  # a network that calls another one is one call
            return inner(*args, **named)
        self.enter(stage)
        while True:
            said, result = self._try(stage, inner, args, named)
            if said is None:
                return result
            self._step_down(stage, said)

    def decode(self, inner: Callable[..., Any], latents: torch.Tensor, *args: Any,
               **named: Any) -> Any:  # fmt: skip
        """As `call`; at the end of the ladder the CPU decodes, in float32.

        Raises:
            OutOfVram: there is no CPU to fall back on, or it has no room either.
        """
        try:
            return self.call(Stage.DECODE, inner, latents, *args, **named)
        except OutOfVram:
            if self.on_cpu is None or self._inside:
                raise
        # Here, since the traceback of what failed held on to the device's memory.
        self.memory.give_back()
        log.warning("decoding on the CPU in float32, since the device has no room for it")
        pixels = self._last(latents)
        self.decoded_on_cpu = True
        if not named.get("return_dict", True):
            return (pixels,)
        from diffusers.models.autoencoders.vae import DecoderOutput  # noqa: PLC0415  # rarely

        return DecoderOutput(sample=pixels)

    def denoise(self, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """As `call`; a sample that is larger than the first pass's is the second pass's."""
        height, width = (args[0] if args else named["sample"]).shape[-2:]
        second = height * width > self.base[0] * self.base[1]
        return self.call(Stage.HIRES if second else Stage.DENOISE, inner, *args, **named)

    def _last(self, latents: torch.Tensor) -> torch.Tensor:
        assert self.on_cpu is not None
        try:
            return self.on_cpu(latents)
        except (RuntimeError, MemoryError, OutOfVram) as error:
            if not _is_for_us(error):
                raise
            said = in_words(str(error))
        raise OutOfVram(f"the CPU, too, {said} while {DOING[Stage.DECODE]}", stage=Stage.DECODE)

    def _try(
        self, stage: str, inner: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[str | None, Any]:
        """The result, or what the error said: the error itself must go, and its traceback."""
        before = self.memory.held()
        self.memory.start_peak()
        self._inside = True
        try:
            # Lists and dicts may be emptied on the way; tensors are not written to.
            result = inner(*_fresh(args), **_fresh(named))
        except (RuntimeError, MemoryError, OutOfVram) as error:
            if not _is_for_us(error):
                raise
            said = str(error)
        else:
            self._note(stage, before, self._taken(before, result))
            return None, result
        finally:
            self._inside = False
        needed = needed_bytes(said)
        if needed is not None and before is not None:
            self._note(stage, before, needed - before)
        return said, None

    def _taken(self, before: int | None, result: Any) -> int | None:
        peak, after = self.memory.peak(), self.memory.held()
        if before is None or peak is None or after is None:
            return None
        rest = after - sum(t.nbytes for t in _tensors(result) if t.device.type != "cpu")
        # Where weights went away during the call, the peak may be theirs.
        return None if before > rest else peak - rest

    def _note(self, stage: str, before: int | None, taken: int | None) -> None:
        if before is None or taken is None or taken <= 0 or stage in self.fell:
            return
        seen = self.accounts[stage]
        seen.bytes = max(taken, seen.bytes or 0)

    def _step_down(self, stage: str, said: str) -> None:
        self.fell.append(stage)
        self.memory.give_back()
        log.debug("%s: %s", stage, said)
        smaller = more_frugal(self.plan, stage)
        if smaller is None:
            raise OutOfVram(
                f"{self.plan.device} {in_words(said)} while {DOING[stage]}, and there is no more "
                "frugal way to do it",
                stage=stage, needed_bytes=needed_bytes(said),
            )  # fmt: skip
        log.warning(
            "%s %s while %s; going on with %s",
            self.plan.device, in_words(said), DOING[stage], changed(self.plan, smaller),
        )  # fmt: skip
        self._switch(smaller)

    def _switch(self, plan: Plan) -> None:
        """Apply the plan, or where its weights find no room, the next cheaper one for them."""
        while True:
            said = self._applied(plan)
            if said is None:
                self.plan = plan
                return
            self.fell.append(Stage.LOAD)
            self.memory.give_back()
            smaller = more_frugal(plan, Stage.LOAD)
            if smaller is None:
                raise OutOfVram(
                    f"{plan.device} {in_words(said)} while {DOING[Stage.LOAD]}, and there is no "
                    "more frugal way to keep them",
                    stage=Stage.LOAD, needed_bytes=needed_bytes(said),
                )  # fmt: skip
            log.warning(
                "%s %s while %s; going on with %s",
                plan.device, in_words(said), DOING[Stage.LOAD], changed(plan, smaller),
            )  # fmt: skip
            plan = smaller

    def _applied(self, plan: Plan) -> str | None:
        try:
            self.apply(plan)
        except (RuntimeError, MemoryError, OutOfVram) as error:
            if not _is_for_us(error):
                raise
            return str(error)
        return None

    def enter(self, stage: str) -> None:
        """Another stage begins, or none: what the last one left goes back to the driver."""
        if stage == self._stage:
            return
        if self._stage:
            self.memory.wait()
        now = time.monotonic()
        if self._stage:
            self.accounts[self._stage].seconds += now - self._since
            self.memory.trim()
        if stage:
            self.accounts.setdefault(stage, Account())
        self._stage, self._since = stage, now


@contextmanager
def _over(component: Any, method: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Call `wrapper(inner, ...)` in the place of a method of one object."""
    before = vars(component).get(method)
    vars(component)[method] = partial(wrapper, getattr(component, method))
    try:
        yield
    finally:
        if before is None:
            del vars(component)[method]
        else:
            vars(component)[method] = before


def _is_for_us(error: Exception) -> bool:
    return isinstance(error, OutOfVram) or ran_out(error)


def changed(before: Plan, after: Plan) -> str:
    """What a more frugal plan does in another way."""
    names: Sequence[tuple[str, str]] = (
        ("batch", "at a time"), ("attention", "attention"), ("passes", "calls a step"),
        ("feed_forward_chunks", "pieces in the feed-forward layers"),
        ("vae_bands", "rows of pixels at a time in the VAE"),
        ("vae_tile", "pixels a tile of the VAE"), ("offload", "as offload"),
        ("resident_bytes", "bytes of weights on the device"),
    )  # fmt: skip
    parts = [
        f"{getattr(after, name)} {words}"
        for name, words in names
        if getattr(after, name) != getattr(before, name) and getattr(after, name)
    ]
    return ", ".join(parts) or "fewer weights on the device"


def _fresh(value: Any) -> Any:
    """The same values in new containers."""
    if type(value) is dict:
        return {key: _fresh(each) for key, each in value.items()}
    return type(value)(map(_fresh, value)) if type(value) in {list, tuple} else value


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for each in result.values():
            yield from _tensors(each)
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _tensors(each)
