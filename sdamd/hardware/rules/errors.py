"""Rules about errors of a run: memory, wrong pictures, slowness, caches, files."""

import re
from collections.abc import Mapping

from sdamd import out_of_memory
from sdamd.hardware.folders import Folder
from sdamd.hardware.rules.rule import (
    FAULT,
    INFO,
    WARNING,
    Case,
    Rule,
    Seen,
    Severity,
    Stage,
    export,
    logged,
    said,
    text,
    unset,
)

_GIB = 2**30
_LITTLE = _GIB  # of free disk; a batch of large pictures, or a download, fills it

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_SIZE = r"(\d{1,6}(?:\.\d{1,2})?) (bytes|[KMG]iB)"
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_NAN = r"all NaNs|\bNaNs?\b|invalid value encountered in cast|black (square|image|picture)"


def _out_of_memory(case: Case) -> Seen | None:
    line = said(case, out_of_memory.TORCH)
    if not line:
        return None
    asked = re.search(rf"Tried to allocate {_SIZE}", case.text)
    free = re.search(rf"{_SIZE}(?: is)? free", case.text)
    why = ""
    if asked and free and _bytes(asked) <= _bytes(free):
        why = "; by its own count that much was free, so it was in pieces, or the limit is another"
    return Seen(reading=line, values={"why": why})


def _bytes(match: re.Match[str]) -> float:
    return float(match[1]) * _UNITS[match[2].lower()]


def allocator_options(value: str) -> frozenset[str]:
    """Return the options of an allocator setting that are in force, in lower case.

    `expandable_segments` counts only where it is true.
    """
    pairs = (entry.partition(":") for entry in value.lower().replace(" ", "").split(","))
    return frozenset(
        name for name, _, on in pairs if name and (name != "expandable_segments" or on == "true")
    )


def _unsafe_allocator(case: Case) -> Seen | None:
    given = {n: v for n in _ALLOCATOR if (v := case.survey.environ.get(n))}
    both = {"max_split_size_mb", "expandable_segments"}
    unsafe = [name for name, value in given.items() if both <= allocator_options(value)]
    if unsafe:
        return Seen(
            reading=", ".join(f"{name}={given[name]}" for name in unsafe),
            values={"fix": unset(case, *unsafe)},
        )
    together = [n for n, v in given.items() if both & allocator_options(v)]
    if both <= frozenset().union(*(allocator_options(given[n]) for n in together)):
        return Seen(
            reading=", ".join(f"{name}={given[name]}" for name in together),
            values={"fix": unset(case, *together)},
            severity=Severity.WARNING,
        )
    line = said(case, r"ALLOC_CONF[^\n]*(max_split_size_mb[^\n]*expandable_segments\s*:\s*true"
                r"|expandable_segments\s*:\s*true[^\n]*max_split_size_mb)")  # fmt: skip
    return Seen(reading=line, values={"fix": unset(case, *_ALLOCATOR)}) if line else None


def _gpu_fault(case: Case) -> Seen | None:
    pattern = (
        r"Memory access fault by GPU node|\[gfxhub\d?\] page fault|MES might be in unrecoverable"
    )
    line = said(case, pattern)
    in_log = "" if line else logged(case, pattern)
    if not line and not in_log:
        return None
    kernel = case.survey.kernel or "of unknown version"
    bad = "; kernels 6.18 are reported to do this and 6.17.9 not" if "6.18." in kernel else ""
    return Seen(
        reading=line or f"the kernel's log: {in_log}",
        values={"kernel": kernel, "bad": bad},
        severity=None if line else Severity.WARNING,
    )


def _vae_nan(case: Case) -> Seen | None:
    line = said(case, r"NaNs? (was|were) produced in VAE|invalid value encountered in cast"
                r"|the picture is (NaN|black)|\bVAE\b[^\n]{0,80}\bNaN|\bNaN[^\n]{0,80}\bVAE\b"
                r"|saved a black (square|image|picture)|black (square|image)s?\b")  # fmt: skip
    return Seen(reading=line) if line and not _unet_nan(case) and not _graph_nan(case) else None


def _unet_nan(case: Case) -> Seen | None:
    line = said(case, r"NaNs? (was|were) produced in Unet|\b(unet|latents?|noise prediction)\b"
                r"[^\n]{0,80}\bNaN|\bNaN[^\n]{0,80}\b(unet|latents?)\b"
                r"|gr[ae]y (image|screen|picture)"
                r"|the (image|picture) is (constant|one colou?r)")  # fmt: skip
    if not line or _graph_nan(case):
        return None
    old = case.arch.startswith(("gfx101", "gfx8"))
    why = f" ({case.arch} is known for it in float16)" if old else ""
    return Seen(reading=line, values={"why": why})


def _graph_nan(case: Case) -> Seen | None:
    about = said(case, r"torch\.?_?(compile|dynamo|inductor)|\bonnx|MIGraphX|DmlExecution")
    line = said(case, _NAN)
    return Seen(reading=line) if about and line else None


def _search_mode(environ: Mapping[str, str]) -> str:
    """The setting that makes MIOpen search long at every new shape, if one is made."""
    for name, slow in (
        ("MIOPEN_FIND_MODE", {"1", "NORMAL"}),
        ("MIOPEN_FIND_ENFORCE", {"3", "SEARCH", "4", "SEARCH_DB_UPDATE"}),
    ):
        if environ.get(name, "").strip().upper() in slow:
            return f"{name}={environ[name]}"
    return ""


def _slow_first(case: Case) -> Seen | None:
    fix = {"fix": export(case, MIOPEN_FIND_MODE="FAST")}
    line = said(
        case, r"first (image|picture|run|generation)[^\n]{0,80}(slow|hangs?|minutes|\d{2,} ?s)"
        r"|run ?1\b[^\n]{0,20}\d{2,}(\.\d+)? ?s|MIOpen[^\n]{0,60}(FindSolution|SearchForAll|tuning)"
        r"|stuck at (0 ?%|VAE)"
    )  # fmt: skip
    if line:
        return Seen(reading=line, values=fix)
    setting = _search_mode(case.survey.environ)
    if setting and case.survey.has_amd:
        return Seen(reading=setting, values=fix, severity=Severity.WARNING)
    return None


def _slow_vae(case: Case) -> Seen | None:
    line = said(case, r"IsEnoughWorkspace|VAE[^\n]{0,60}\b(slow|slower|takes|minutes)\b"
                r"|slow[^\n]{0,40}\bVAE\b|upscal[^\n]{0,60}\bslow")  # fmt: skip
    if line:
        return Seen(reading=line, values={"fix": export(case, MIOPEN_FIND_MODE="FAST")})
    nhwc = case.survey.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") == "1"
    arch = case.survey.gpu.architecture if case.survey.gpu else None
    if not nhwc or arch is None or not arch.generation.startswith("RDNA"):
        return None
    return Seen(
        reading=f"PYTORCH_MIOPEN_SUGGEST_NHWC=1 on {arch.gfx}",
        values={"fix": unset(case, "PYTORCH_MIOPEN_SUGGEST_NHWC")},
    )


def _miopen_cache(case: Case) -> Seen | None:
    fix = {
        "fix": "mkdir -p /var/tmp/$USER/miopen && export "
        "MIOPEN_USER_DB_PATH=/var/tmp/$USER/miopen MIOPEN_CUSTOM_CACHE_DIR=/var/tmp/$USER/miopen",
        "own": "",
    }
    line = said(
        case, r"MIOpen[^\n]{0,60}(SQLite|cannot create director|Permission denied)"
        r"|\.ufdb\.txt|\.updb\.txt|kern_db\.hpp|Internal error while accessing SQLite"
    )  # fmt: skip
    if line:
        return Seen(reading=line, values=fix)
    bad = [f for f in case.survey.folders if f.is_miopen and (f.problem or f.remote or _full(f))]
    if not bad:
        return None
    worst = min(bad, key=lambda f: (not f.variable, not f.problem))
    why = worst.problem or (
        f"it is on {worst.remote}, another machine's file system"
        if worst.remote
        else f"{worst.free_bytes // 2**20} MiB are free there"
    )
    name = f", which {worst.variable} sets" if worst.variable else ""
    severity = Severity.FAULT if worst.variable and worst.problem else Severity.WARNING
    if not worst.variable:
        fix["own"] = " sdamd keeps a folder of its own, so this is about other programs."
    return Seen(
        reading=f"{worst.what} is {worst.path}{name}: {why}",
        values=fix,
        severity=severity if case.survey.has_amd else Severity.INFO,
    )


def _full(folder: Folder) -> bool:
    return 0 <= folder.free_bytes < _LITTLE


def _damaged_model(case: Case) -> Seen | None:
    line = said(
        case, r"HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeader"
        r"|Error while deserializing header|header too (large|small)"
        r"|incomplete metadata, file not fully covered|invalid header length"
        r"|invalid JSON in header|is a Git LFS pointer|is an HTML page"
    )  # fmt: skip
    return Seen(reading=line) if line else None


def _gradio_folder(case: Case) -> Seen | None:
    line = said(case, r"PermissionError[^\n]*gradio|Permission denied[^\n]*[\\/]gradio")
    return Seen(reading=line) if line else None


def _disk_full(case: Case) -> Seen | None:
    line = said(case, r"\[?Errno 28\]?|No space left on device|ENOSPC|not enough space on the disk")
    full = [f for f in case.survey.folders if _full(f) and not f.is_miopen]
    named = ", ".join(f"{f.what} ({f.path}): {f.free_bytes // 2**20} MiB free" for f in full)
    if line:
        return Seen(reading=f"{line}{f' ({named})' if named else ''}")
    if not full:
        return None
    empty = any(f.free_bytes < 2**26 for f in full)
    return Seen(reading=named, severity=None if empty else Severity.WARNING)


def _no_data_folder(case: Case) -> Seen | None:
    bad = [f for f in case.survey.folders if f.problem and not f.is_miopen]
    if not bad:
        return None
    return Seen(reading="; ".join(f"{f.what} would go to {f.path}: {f.problem}" for f in bad))


RULES = (
    Rule(number=26, name="out-of-memory", stage=Stage.MEMORY, severity=FAULT, sees=_out_of_memory,
         cause="The run asked for more memory than the GPU had left{why}. sdamd frees what it "
         "can and goes on in mid-step: fewer samples at a time, weights from RAM, the VAE in bands "
         "and then in tiles, at last on the CPU; a smaller picture always helps.",
         fix="sdamd plan (with the flags of the run: it names the nearest size that fits)",
         source="ROCm/ROCm#4742; ComfyUI#2431"),
    Rule(number=27, name="unsafe-allocator", stage=Stage.VARIABLES, severity=FAULT,
         sees=_unsafe_allocator,
         cause="The allocator options max_split_size_mb and expandable_segments together make live "
         "tensors read back as zeros; either one alone is safe.",
         fix="{fix}", source="ROCm/ROCm#6603; pytorch#123548"),
    Rule(number=31, name="directml-out-of-memory", stage=Stage.MEMORY, severity=FAULT,
         sees=text(out_of_memory.DIRECTML),
         cause="DirectML's heap is full, and torch-directml never gives memory back; onnxruntime, "
         "which sdamd uses, does when a session ends.",
         fix="restart the program, and draw smaller or fewer pictures at a time (sdamd: "
         "--batch-size 1)", source="DirectML#412; stable-diffusion-webui-amdgpu#38; ComfyUI#2075"),
    Rule(number=32, name="device-removed", stage=Stage.RUN, severity=FAULT,
         sees=text(r"887A000[567]|887A0020|device instance has been suspended"
                   r"|GPU will not respond to more commands"),
         cause="Windows reset the graphics driver, since a computation took longer than it allows "
         "or the driver failed; everything on the GPU is lost.",
         fix="restart the program with a smaller picture, and update the graphics driver",
         source="stable-diffusion-webui-amdgpu#22; sdnext#1696; onnxruntime#22700, #28495"),
    Rule(number=33, name="gpu-memory-fault", stage=Stage.RUN, severity=FAULT, sees=_gpu_fault,
         cause="Kernel driver or firmware lost a page under a running computation (kernel "
         "{kernel}{bad}); nothing in a program can prevent it. On some machines "
         "amdgpu.cwsr_enable=0 on the kernel's command line helped.",
         fix="start the previous kernel from the boot menu, and try again",
         source="ROCm/ROCm#5051; ROCm/amdgpu#204; amd-strix-halo-toolboxes#44"),
    Rule(number=34, name="vae-nan", stage=Stage.RUN, severity=WARNING, sees=_vae_nan,
         cause="The decoder overflowed in half precision, above all with SDXL's own; switching the "
         "check for it off only saves black files.",
         fix="sdamd generate PROMPT --dtype float32 (sdamd decodes such a picture again in float32 "
         "by itself)", source="sdnext#374; A1111#7633"),
    Rule(number=35, name="unet-nan", stage=Stage.RUN, severity=FAULT, sees=_unet_nan,
         cause="The picture was wrong before it was decoded{why}, so another decoder does not "
         "help: half precision or this build fails on this architecture.",
         fix="sdamd generate PROMPT --dtype float32",
         source="A1111#4634; pytorch#103973; stable-diffusion-webui-amdgpu#646"),
    Rule(number=36, name="graph-nan", stage=Stage.RUN, severity=FAULT, sees=_graph_nan,
         cause="A compiled or exported graph multiplies queries and keys in half precision, which "
         "overflows; the same model without the graph is right.",
         fix="switch torch.compile off, or keep attention in float32 (in sdamd: --dtype float32)",
         source="AMDMIGraphX#2555; diffusers#1083"),
    Rule(number=37, name="slow-first-picture", stage=Stage.RUN, severity=INFO, sees=_slow_first,
         cause="MIOpen looks for the fastest convolution once for each picture size, which takes "
         "seconds to minutes and is kept on the disk; it does not hang.",
         fix="{fix}", source="TheRock#3266; ComfyUI-Zluda#350; rocm-libraries#2218"),
    Rule(number=38, name="slow-vae", stage=Stage.RUN, severity=INFO, sees=_slow_vae,
         cause="MIOpen chose a slow convolution for the decoder's large layers, or has too little "
         "memory for the fast one.",
         fix="{fix}", source="ComfyUI PR#10302, PR#11381, #14895"),
    Rule(number=39, name="hipblaslt-unsupported", stage=Stage.RUN, severity=INFO,
         sees=text(r"Attempting to use hipBLASLt on an unsupported architecture"),
         cause="torch tried a library that has no kernels for this GPU and took the other one; "
         "nothing is wrong.",
         fix="nothing to do (to silence it: export TORCH_BLAS_PREFER_HIPBLASLT=0)",
         source="pytorch#138067; ROCm/ROCm#4440"),
    Rule(number=40, name="miopen-cache", stage=Stage.FILES, severity=FAULT, sees=_miopen_cache,
         cause="MIOpen keeps what it found in a small database, and ends the process when it "
         "cannot write or lock that: its folder is read-only, full, on another machine, or "
         "shared.{own}",
         fix="{fix}", source="MIOpen#1427, #1878, #2214; tensorflow-upstream#1419"),
    Rule(number=41, name="damaged-model", stage=Stage.FILES, severity=FAULT, sees=_damaged_model,
         cause="The file is not whole, or no model at all: a Git LFS pointer, a web page, a "
         "cut-off download, a renamed pickle. The message is the same for all; its start tells.",
         fix="head -c 64 FILE (version https://git-lfs: a pointer; <!DOCTYPE: a page; PK: a "
         "pickle; else cut off: download it again)", source="A1111#10014; ComfyUI#15602"),
    Rule(number=42, name="pickle", stage=Stage.FILES, severity=FAULT,
         sees=text(r"Weights only load failed|weights_only|Unsupported global: GLOBAL"
                   r"|can run any code"),
         cause="The checkpoint is a pickle that holds more than weights, and opening it could run "
         "any program; turning the check off would be just that.",
         fix="take the .safetensors version of the model, or convert it on a machine that can be "
         "thrown away", source="diffusers#8874; ComfyUI#12286"),
    Rule(number=43, name="gradio-folder", stage=Stage.FILES, severity=FAULT, sees=_gradio_folder,
         cause="Another user of this machine made gradio's temporary folder first, so pictures are "
         "drawn but cannot be shown.",
         fix="export GRADIO_TEMP_DIR=$XDG_RUNTIME_DIR/sdamd", source="Fooocus#1065"),
    Rule(number=44, name="disk-full", stage=Stage.FILES, severity=FAULT, sees=_disk_full,
         cause="The disk of the pictures, of temporary files or of downloads is full; HF_HOME, "
         "TMPDIR and SDAMD_HOME move them to another one.",
         fix='df -h "${{SDAMD_HOME:-$HOME}}" "${{TMPDIR:-/tmp}}" "${{HF_HOME:-$HOME}}"',
         source="diffusers#4957"),
    Rule(number=51, name="folder-not-writable", stage=Stage.FILES, severity=FAULT,
         sees=_no_data_folder,
         cause="Models, pictures and caches need a folder that this user may write to.",
         fix='export SDAMD_HOME="$HOME/sdamd"', source="sdamd"),
)  # fmt: skip
