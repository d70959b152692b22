"""Trains the embedded model on the CPU, from pictures drawn by `tiny_pictures`.

    python -m scripts.train_tiny_model --work training all

Stages, each resumable: `pictures` draws the training set, `tokenizer` learns a vocabulary from the
captions, `vae` trains the autoencoder (then frozen), `latents` encodes the set, `unet` trains the
UNet and the text encoder together, `export` writes the diffusers folder into `sdamd/assets/tiny`;
`unpack` is its opposite, to train on from there (then pictures, latents, unet, export).
Two single-threaded processes share the gradient work, which on a small CPU beats two threads.
"""

import argparse
import json
import logging
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from scripts import tiny_pictures

log = logging.getLogger("train")

ASSETS = Path(__file__).resolve().parent.parent / "sdamd" / "assets" / "tiny"
SIZES = ((128, 128), (160, 96), (96, 160))
HELD_OUT = 64
"""Of each size, the first pictures are never trained on."""
VOCABULARY = 1500


# -- optimiser ------------------------------------------------------------------------------------


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest matrix with singular values near 1, by five Newton-Schulz steps.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers", with its quintic
    coefficients (3.4445, -4.7750, 2.0315).
    """
    x = gradient.reshape(len(gradient), -1)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    turned: Tensor = x if wide else x.T
    return turned.reshape(gradient.shape)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; the step is rms-matched to Adam's (0.2 sqrt(max side))."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, _: None = None) -> None:  # type: ignore[override]  # no closure is used
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(state["momentum"], group["momentum"]))
                rows, columns = p.shape[0], p[0].numel()
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))


def optimisers(modules: Mapping[str, nn.Module], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for what is no matrix or stands at the ends."""
    ends = ("embed", "conv_in", "conv_out", "quant_conv", "time_emb")
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in modules.values():
        for name, p in module.named_parameters():
            inner = p.ndim >= 2 and not any(e in name for e in ends)
            (matrices if inner else others).append(p)
    return [
        Muon(matrices, lr),
        torch.optim.AdamW(others, lr=lr * 0.5, weight_decay=0.0, betas=(0.9, 0.99)),
    ]


def half_precision() -> torch.autocast:
    """Compute in bfloat16 where the CPU can; without its instructions that is eighty times slower.

    Measured on a processor with AVX2 alone: 5.3 s for a convolution that takes 0.07 s in float32.
    """
    able = torch.cpu.get_capabilities()
    return torch.autocast(
        "cpu", torch.bfloat16, enabled=bool(able.get("amx_bf16") or able.get("avx512_bf16"))
    )


def schedule(step: int, steps: int, *, warm_up: int, decay_from: float) -> float:
    """A factor on the learning rate: linear warm-up, constant, then linear to zero."""
    up = min(1.0, (step + 1) / warm_up)
    left = (steps - step) / (steps * (1 - decay_from))
    return min(up, max(0.0, min(1.0, left)))


# -- running in two processes ---------------------------------------------------------------------


def together(work: Path, stage: Callable[..., None], ranks: int, **options: Any) -> None:
    """Run `stage(work, rank, ranks, **options)` in `ranks` processes that share gradients."""
    context = multiprocessing.get_context("spawn")
    rendezvous = work / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    children = [
        context.Process(target=_child, args=(work, stage, rank, ranks, options))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        sys.exit(f"{stage.__name__} failed: {[child.exitcode for child in children]}")


def _child(
    work: Path, stage: Callable[..., None], rank: int, ranks: int, options: dict[str, Any]
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=ranks
        )
    stage(work, rank, ranks, **options)
    if ranks > 1:
        dist.destroy_process_group()


def share_gradients(parameters: list[nn.Parameter], ranks: int) -> None:
    """Average the gradients of all processes, in one message."""
    if ranks == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads]).bfloat16()
    dist.all_reduce(flat)
    at = 0
    for g in grads:
        g.copy_(flat[at : at + g.numel()].reshape(g.shape)).div_(ranks)
        at += g.numel()


def descend(
    loss: Tensor,
    parameters: list[nn.Parameter],
    opts: list[torch.optim.Optimizer],
    ranks: int,
) -> None:
    """Take one step down the gradient that all processes found together."""
    for p in parameters:
        p.grad = None
    loss.backward()  # type: ignore[no-untyped-call]  # torch types its engine, not this
    share_gradients(parameters, ranks)
    for opt in opts:
        opt.step()


class Average:
    """Exponential moving average of the weights: what is kept of a training run."""

    def __init__(self, modules: Mapping[str, nn.Module], decay: float) -> None:
        self.decay = decay
        self.live = {
            f"{m}.{n}": p for m, module in modules.items() for n, p in module.named_parameters()
        }
        self.mean = {n: p.detach().clone() for n, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the mean towards the live weights; early steps count for less."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.mean.values()), list(self.live.values()), 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Put the mean into the modules."""
        for name, p in self.live.items():
            p.copy_(self.mean[name])


def checkpoint(path: Path, average: Average, **facts: Any) -> None:
    """Write raw and averaged weights and the step, whole or not at all."""
    tensors = {f"live.{n}": p.detach().contiguous() for n, p in average.live.items()}
    tensors |= {f"mean.{n}": p.contiguous() for n, p in average.mean.items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={k: json.dumps(v) for k, v in facts.items()})
    temporary.replace(path)


@torch.no_grad()
def restore(path: Path, average: Average) -> int:
    """Read what `checkpoint` wrote; the number of steps that are done."""
    if not path.exists():
        return 0
    tensors = load_file(path)
    for name, p in average.live.items():
        p.copy_(tensors[f"live.{name}"])
        average.mean[name].copy_(tensors[f"mean.{name}"])
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(json.loads(header["__metadata__"]["step"]))


# -- pictures and captions ------------------------------------------------------------------------


def pictures(work: Path, square: int, oblong: int, processes: int) -> None:
    """Draw the training set: raw RGB in `pictures-WxH.npy`, captions in `captions-WxH.json`."""
    for number, size in enumerate(SIZES):
        count = square if number == 0 else oblong
        path = work / f"pictures-{size[0]}x{size[1]}.npy"
        if path.exists():
            continue
        partial = path.with_suffix(".partial.npy")
        shape = (count, size[1], size[0], 3)
        pixels = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        captions: list[str] = []
        base = number * 10_000_000
        with multiprocessing.Pool(processes) as pool:
            jobs = ((base + i, size) for i in range(count))
            for i, (image, caption) in enumerate(pool.imap(_draw, jobs, chunksize=64)):
                pixels[i] = image
                captions.append(caption)
        pixels.flush()
        (work / f"captions-{size[0]}x{size[1]}.json").write_text(json.dumps(captions))
        partial.rename(path)
        log.info("drew %d pictures of %dx%d", count, *size)


def _draw(job: tuple[int, tuple[int, int]]) -> tuple[np.ndarray[Any, Any], str]:
    picture = tiny_pictures.draw(*job)
    return np.asarray(picture.image), picture.caption


def tokenizer(work: Path) -> None:
    """A byte-level CLIP vocabulary of the captions' words; any other text still has tokens."""
    if (work / "tokenizer" / "vocab.json").exists():
        return
    captions = [
        c for s in SIZES for c in json.loads((work / f"captions-{s[0]}x{s[1]}.json").read_text())
    ]
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=sorted(letters), end_of_word_suffix="</w>",
        show_progress=False, min_frequency=3,
    )  # fmt: skip
    bpe.train_from_iterator(captions, trainer)
    learnt = json.loads(bpe.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in learnt["merges"]]
    # CLIP's order: bytes, bytes that end a word, merges, then the two markers.
    words = [*sorted(letters), *(f"{c}</w>" for c in sorted(letters))]
    words += [w for m in merges if (w := "".join(m.split(" "))) not in set(words)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder = work / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(words))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True,
        "bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
    }, indent=2))  # fmt: skip
    log.info("%d tokens", len(vocabulary))


def load_tokenizer(work: Path) -> CLIPTokenizer:
    """The vocabulary that stage `tokenizer` wrote."""
    return CLIPTokenizer.from_pretrained(work / "tokenizer")


# -- autoencoder ----------------------------------------------------------------------------------


def build_vae(scaling_factor: float = 1.0) -> AutoencoderKL:
    """SD's autoencoder, 8 times smaller per side with 4 channels, in narrow."""
    return AutoencoderKL(
        block_out_channels=(32, 64, 96, 96), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4, mid_block_add_attention=False, sample_size=128,
        scaling_factor=scaling_factor,
    )  # fmt: skip


def _crops(work: Path, rank: int, batch: int, side: int, step: int) -> Tensor:
    """Random crops in [-1, 1], another set in every step and process."""
    rng = np.random.default_rng((step, rank, 7))
    which = rng.choice(3, p=(0.8, 0.1, 0.1))
    width, height = SIZES[which]
    pixels = np.load(work / f"pictures-{width}x{height}.npy", mmap_mode="r")
    out = np.empty((batch, side, side, 3), dtype=np.uint8)
    for i in range(batch):
        n = int(rng.integers(HELD_OUT, len(pixels)))
        x, y = int(rng.integers(0, width - side + 1)), int(rng.integers(0, height - side + 1))
        crop = pixels[n, y : y + side, x : x + side]
        out[i] = crop[:, ::-1] if rng.random() < 0.5 else crop
    return torch.from_numpy(out).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def _vae_loss(made: Tensor, target: Tensor) -> Tensor:
    difference = made - target
    loss = F.l1_loss(made, target) + 2.0 * difference.square().mean()
    loss = loss + 0.5 * F.avg_pool2d(difference, 4).abs().mean()
    loss = loss + 0.5 * (difference[..., 1:] - difference[..., :-1]).abs().mean()
    return loss + 0.5 * (difference[..., 1:, :] - difference[..., :-1, :]).abs().mean()


@torch.no_grad()
def psnr(vae: AutoencoderKL, work: Path, count: int = 24) -> float:
    """Mean peak signal-to-noise ratio in dB over held-out pictures, pixels in 0..1."""
    pixels = np.load(work / "pictures-128x128.npy", mmap_mode="r")[:count]
    images = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    values = []
    for image in torch.split(images, 4):
        made = vae.decode(vae.encode(image).latent_dist.mean).sample.clamp(-1, 1)
        error = ((made - image) / 2).square().mean(dim=(1, 2, 3))
        values += (-10 * error.log10()).tolist()
    return sum(values) / len(values)


def train_vae(
    work: Path, rank: int, ranks: int, *, steps: int, batch: int, side: int, lr: float
) -> None:
    """Train the autoencoder; writes `vae.safetensors`."""
    torch.manual_seed(1)
    vae = build_vae()
    parts: dict[str, nn.Module] = {"vae": vae}
    average = Average(parts, 0.995)
    path = work / "vae-run.safetensors"
    done = restore(path, average)
    opts = optimisers(parts, lr)
    rates = [o.param_groups[0]["lr"] for o in opts]
    parameters = list(vae.parameters())
    began, seen = time.time(), 0.0
    for step in range(done, steps):
        factor = schedule(step, steps, warm_up=60, decay_from=0.35) * min(
            1.0, (step - done + 1) / 40
        )
        for opt, rate in zip(opts, rates, strict=True):
            opt.param_groups[0]["lr"] = rate * factor
        images = _crops(work, rank, batch, side, step)
        with half_precision():
            posterior = vae.encode(images).latent_dist
            made = vae.decode(posterior.sample()).sample
        kl = 0.5 * (
            posterior.mean.float().square() + posterior.var.float() - 1 - posterior.logvar.float()
        )
        loss = _vae_loss(made.float(), images) + 2e-4 * kl.mean()
        descend(loss, parameters, opts, ranks)
        average.update(step)
        seen = loss.item() if seen == 0 else 0.98 * seen + 0.02 * loss.item()
        if rank == 0 and (step + 1) % 100 == 0:
            each = (time.time() - began) / (step + 1 - done)
            log.info("vae %d/%d loss %.4f %.2f s/step", step + 1, steps, seen, each)
        if rank == 0 and ((step + 1) % 400 == 0 or step + 1 == steps):
            checkpoint(path, average, step=step + 1)
            probe = build_vae()
            probe.load_state_dict({n.removeprefix("vae."): t for n, t in average.mean.items()})
            log.info("vae %d psnr %.2f dB", step + 1, psnr(probe.eval(), work))
    if rank == 0:
        average.apply()
        save_file(vae.state_dict(), work / "vae.safetensors")


def latents(work: Path, processes: int) -> None:
    """Encode every picture; writes `latents-WxH.npy` (float16, unscaled) and the scale."""
    for width, height in SIZES:
        path = work / f"latents-{width}x{height}.npy"
        if path.exists():
            continue
        count = len(np.load(work / f"pictures-{width}x{height}.npy", mmap_mode="r"))
        jobs = [(work, width, height, at) for at in range(0, count, 32)]
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            np.save(path, np.concatenate(pool.map(_encode, jobs, chunksize=8)))
        log.info("encoded %s", path.name)
    square = np.load(work / "latents-128x128.npy").astype(np.float32)
    scale = round(float(1 / square.std()), 4)
    (work / "scale.json").write_text(json.dumps({"scaling_factor": scale}))


@torch.no_grad()
def _encode(job: tuple[Path, int, int, int]) -> np.ndarray[Any, Any]:
    work, width, height, at = job
    torch.set_num_threads(1)
    pixels = np.load(work / f"pictures-{width}x{height}.npy", mmap_mode="r")[at : at + 32]
    images = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    with half_precision():
        mean = _trained_vae(work).encode(images).latent_dist.mean
    encoded: np.ndarray[Any, Any] = mean.float().numpy().astype(np.float16)
    return encoded


@cache
def _trained_vae(work: Path) -> AutoencoderKL:
    vae = build_vae()
    vae.load_state_dict(load_file(work / "vae.safetensors"))
    return vae.eval()


# -- text encoder and UNet ------------------------------------------------------------------------


def build_text_encoder(tokens: CLIPTokenizer) -> CLIPTextModel:
    """A CLIP text model of two layers."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens), hidden_size=128, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=77, projection_dim=128,
            bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )  # fmt: skip


def build_unet() -> UNet2DConditionModel:
    """SD's UNet with cross-attention, narrow, for 16 x 16 latents."""
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(64, 96, 128), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=128, attention_head_dim=4, norm_num_groups=32,
    )  # fmt: skip


def alphas_cumprod() -> Tensor:
    """SD's schedule: scaled linear betas 0.00085 to 0.012 over 1000 steps."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0).float()


class Latents:
    """The encoded set with its tokens, and random batches of it."""

    def __init__(self, work: Path, tokens: CLIPTokenizer) -> None:
        scale = json.loads((work / "scale.json").read_text())["scaling_factor"]
        self.sets: list[tuple[Tensor, Tensor]] = []
        for width, height in SIZES:
            encoded = torch.from_numpy(np.load(work / f"latents-{width}x{height}.npy")) * scale
            captions = json.loads((work / f"captions-{width}x{height}.json").read_text())
            ids = tokens(captions, padding="max_length", max_length=77, truncation=True).input_ids
            self.sets.append((encoded, torch.tensor(ids, dtype=torch.int32)))
        self.blank = torch.tensor(
            tokens([""], padding="max_length", max_length=77).input_ids[0], dtype=torch.int32
        )

    def batch(self, rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        """(size, 4, h, w) latents and (size, 77) token ids; one caption in ten is left blank."""
        encoded, ids = self.sets[rng.choice(3, p=(0.86, 0.07, 0.07))]
        rows = torch.from_numpy(rng.integers(HELD_OUT, len(encoded), size))
        words = ids[rows].long()
        words[torch.from_numpy(rng.random(size) < 0.1)] = self.blank.long()
        return encoded[rows].float(), words


def train_unet(
    work: Path, rank: int, ranks: int, *, steps: int, batch: int, lr: float, decay_from: float
) -> None:
    """Train UNet and text encoder on the velocity; writes `unet-run.safetensors`."""
    torch.manual_seed(2)
    tokens = load_tokenizer(work)
    unet, text = build_unet(), build_text_encoder(tokens)
    unet.set_attn_processor(AttnProcessor())  # the CPU's fused backward is slower at these sizes
    parts: dict[str, nn.Module] = {"unet": unet, "text": text}
    average = Average(parts, 0.999)
    path = work / "unet-run.safetensors"
    done = restore(path, average)
    opts = optimisers(parts, lr)
    rates = [o.param_groups[0]["lr"] for o in opts]
    parameters = [p for part in parts.values() for p in part.parameters()]
    data, alphas = Latents(work, tokens), alphas_cumprod()
    began, seen = time.time(), 0.0
    for step in range(done, steps):
        factor = schedule(step, steps, warm_up=200, decay_from=decay_from) * min(
            1.0, (step - done + 1) / 50
        )
        for opt, rate in zip(opts, rates, strict=True):
            opt.param_groups[0]["lr"] = rate * factor
        # Both processes take the same size of picture, so that neither waits for the other.
        rng = np.random.default_rng((step, 11))
        clean, words = data.batch(rng, batch * ranks)
        clean, words = clean[rank::ranks], words[rank::ranks]
        t = torch.from_numpy(rng.integers(0, 1000, batch * ranks))[rank::ranks]
        noise = torch.randn(
            clean.shape, generator=torch.Generator().manual_seed(step * ranks + rank)
        )
        signal = alphas[t].sqrt()[:, None, None, None]
        spread = (1 - alphas[t]).sqrt()[:, None, None, None]
        with half_precision():
            states = text(words).last_hidden_state
            made = unet(signal * clean + spread * noise, t, states).sample
        loss = F.mse_loss(made.float(), signal * noise - spread * clean)
        descend(loss, parameters, opts, ranks)
        average.update(step)
        seen = loss.item() if seen == 0 else 0.99 * seen + 0.01 * loss.item()
        if rank == 0 and (step + 1) % 100 == 0:
            each = (time.time() - began) / (step + 1 - done)
            log.info("unet %d/%d loss %.4f %.2f s/step", step + 1, steps, seen, each)
        if rank == 0 and ((step + 1) % 250 == 0 or step + 1 == steps):
            checkpoint(path, average, step=step + 1)


# -- export ---------------------------------------------------------------------------------------


def export(work: Path, folder: Path) -> None:
    """Write a `StableDiffusionPipeline` folder with float16 weights."""
    tokens = load_tokenizer(work)
    scale = json.loads((work / "scale.json").read_text())["scaling_factor"]
    unet, text, vae = build_unet(), build_text_encoder(tokens), build_vae(scale)
    vae.load_state_dict(load_file(work / "vae.safetensors"))
    average = Average({"unet": unet, "text": text}, 0)
    step = restore(work / "unet-run.safetensors", average)
    average.apply()
    for name, module in (("unet", unet), ("text_encoder", text), ("vae", vae)):
        module.half().save_pretrained(folder / name)
    shutil.copytree(work / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({
        "_class_name": "DPMSolverMultistepScheduler", "beta_start": 0.00085, "beta_end": 0.012,
        "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
        "prediction_type": "v_prediction", "timestep_spacing": "linspace", "steps_offset": 0,
        "final_sigmas_type": "zero",
    }, indent=2) + "\n")  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None], "image_encoder": [None, None],
        "requires_safety_checker": False, "safety_checker": [None, None],
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
    }, indent=2) + "\n")  # fmt: skip
    log.info("exported after %d steps to %s", step, folder)


def unpack(folder: Path, work: Path) -> None:
    """Begin where an exported model stands, so that training can go on from the repository alone.

    Momentum and the unaveraged weights are lost, so a run needs its warm-up and decay again.
    """
    shutil.copytree(folder / "tokenizer", work / "tokenizer", dirs_exist_ok=True)
    unet = build_unet()
    unet.load_state_dict(load_file(folder / "unet" / "diffusion_pytorch_model.safetensors"))
    text = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    parts: dict[str, nn.Module] = {"unet": unet, "text": text}
    checkpoint(work / "unet-run.safetensors", Average(parts, 0), step=0)
    vae = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    save_file({name: t.float() for name, t in vae.items()}, work / "vae.safetensors")
    scale = json.loads((folder / "vae" / "config.json").read_text())["scaling_factor"]
    (work / "scale.json").write_text(json.dumps({"scaling_factor": scale}))
    log.info("unpacked %s; draw pictures, encode latents, then train on", folder)


def main() -> None:
    """Run one stage, or all of them in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages_there = ("pictures", "tokenizer", "vae", "latents", "unet", "export")
    parser.add_argument("stage", choices=("all", *stages_there, "unpack"))
    parser.add_argument(
        "--work", type=Path, default=Path("training"), help="folder of what is unfinished"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--pictures", type=int, default=22_000)
    parser.add_argument("--vae-steps", type=int, default=4_000)
    parser.add_argument("--unet-steps", type=int, default=7_000)
    parser.add_argument("--unet-rate", type=float, default=2e-3, help="lower to train on")
    parser.add_argument(
        "--decay-from", type=float, default=0.45, help="share of the steps before the decay"
    )
    parser.add_argument("--to", type=Path, default=ASSETS, help="where `export` writes")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work: Path = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    two = asked.processes
    stages: dict[str, Callable[[], None]] = {
        "pictures": lambda: pictures(work, asked.pictures, asked.pictures // 10, two),
        "tokenizer": lambda: tokenizer(work),
        "vae": lambda: together(work, train_vae, two, steps=asked.vae_steps, batch=8, side=64,
                                lr=3e-3),
        "latents": lambda: latents(work, two),
        "unet": lambda: together(work, train_unet, two, steps=asked.unet_steps, batch=32,
                                 lr=asked.unet_rate, decay_from=asked.decay_from),
        "export": lambda: export(work, asked.to),
        "unpack": lambda: unpack(asked.to, work),
    }  # fmt: skip
    for name, run in stages.items():
        if asked.stage == name or (asked.stage == "all" and name in stages_there):
            run()


if __name__ == "__main__":
    main()
