"""The words of the UI in English and Simplified Chinese; the language is the browser's.

What is on the page from the start is looked up in the browser (`gr.I18n`); what is said later, with
figures in it, is looked up here. Labels and help of the request's fields are English by nature:
they are the names and help of the fields themselves.
"""

from dataclasses import MISSING, Field, fields
from typing import Any, Final

import gradio as gr

from sdamd.request import SEED_MAX, Job, Request, limits_of

ENGLISH: Final = "en"
CHINESE: Final = "zh-CN"

TEXTS: Final[dict[str, dict[str, str]]] = {
    ENGLISH: {
        "generate": "Generate",
        "stop": "Stop",
        "pictures": "Pictures",
        "record": "Record of the selected picture",
        "problems": "What to change",
        "example": "What the picture shows, such as: mountains by the sea at sunset",
        "drawn": "drawn anew",
        "embedded": "embedded model",
        "own": "default",
        "own is": "{value} (default)",
        "range": "{minimum} to {maximum}",
        "multiples": "multiples of {multiple_of}",
        "blank": "empty: the model's own",
        "and": "; ",
        "allowed": "{help} ({allowed})",
        "idle": "Ready",
        "refused": "Not started",
        "waiting": "Waiting for the run before it",
        "loading": "Loading the model",
        "rendering": "Picture {first} of {total}",
        "rendering together": "Pictures {first} to {last} of {total}",
        "step": "step {step} of {steps}",
        "left": "{duration} left",
        "stopping": "Stopping after this step",
        "done": "{saved} of {total} done in {duration}",
        "stopped": "Stopped; {saved} of {total} saved",
        "failed": "Failed; {saved} of {total} saved",
        "more": "the last {shown} are shown, all are in {folder}",
    },
    CHINESE: {
        "generate": "生成",
        "stop": "停止",
        "pictures": "图片",
        "record": "所选图片的生成参数",
        "problems": "需要修改",
        "example": "描述画面内容，例如：mountains by the sea at sunset",
        "drawn": "随机",
        "embedded": "内置模型",
        "own": "默认",
        "own is": "{value}（默认）",
        "range": "{minimum} 至 {maximum}",
        "multiples": "{multiple_of} 的倍数",
        "blank": "留空则用模型默认值",
        "and": "；",
        "allowed": "{help}（{allowed}）",
        "idle": "就绪",
        "refused": "未开始",
        "waiting": "正在等待上一个任务",
        "loading": "正在加载模型",
        "rendering": "第 {first} 张，共 {total} 张",
        "rendering together": "第 {first} 至 {last} 张，共 {total} 张",
        "step": "第 {step} 步，共 {steps} 步",
        "left": "剩余 {duration}",
        "stopping": "将在这一步之后停止",
        "done": "完成 {saved} / {total} 张，用时 {duration}",
        "stopped": "已停止，已保存 {saved} / {total} 张",
        "failed": "失败，已保存 {saved} / {total} 张",
        "more": "仅显示最后 {shown} 张，全部图片在 {folder}",
        "label prompt": "提示词",
        "label negative_prompt": "反向提示词",
        "label checkpoint": "模型",
        "label width": "宽度",
        "label height": "高度",
        "label steps": "步数",
        "label guidance_scale": "提示词相关性",
        "label scheduler": "采样器",
        "label seed": "种子",
        "label count": "数量",
        "label upscale": "放大倍数",
        "help prompt": "图片要表现的内容",
        "help negative_prompt": "图片中不应出现的内容",
        "help checkpoint": "模型的名称、文件、文件夹或 Hub ID，留空则用内置模型",
        "help width": "放大前的宽度（像素）",
        "help height": "放大前的高度（像素）",
        "help steps": "去噪步数",
        "help guidance_scale": "遵循提示词的程度，1 表示关闭引导",
        "help scheduler": "diffusers 的名称，或 Euler a 这样的别名",
        "help seed": "第一张图片的种子，留空则随机",
        "help count": "图片数量，每张的种子依次加一",
        "help upscale": "完成后放大的倍数",
        "label init_image": "初始图片",
        "label strength": "重绘幅度",
        "label resize_mode": "缩放方式",
        "label mask_image": "蒙版图片",
        "label mask_mode": "蒙版模式",
        "label mask_blur": "蒙版模糊",
        "label mask_padding": "蒙版边距",
        "label mask_fill": "蒙版填充",
        "label outpaint_left": "向左扩展",
        "label outpaint_right": "向右扩展",
        "label outpaint_top": "向上扩展",
        "label outpaint_bottom": "向下扩展",
        "label outpaint_steps": "扩展轮数",
        "label hires_scale": "高清修复倍数",
        "label hires_upscaler": "高清放大方式",
        "label hires_steps": "高清步数",
        "label hires_strength": "高清重绘幅度",
        "label hires_scheduler": "高清采样器",
        "label hires_guidance_scale": "高清提示词相关性",
        "label hires_tile": "高清分块边长",
        "label denoise_tile": "去噪分块边长",
        "help init_image": "作为起点的图片文件",
        "help strength": "初始图片重绘的程度，0 表示完全保留",
        "help resize_mode": "如何让初始图片符合所选尺寸",
        "help mask_image": "需要重绘的部分：图片文件，或用 alpha 表示透明部分",
        "help mask_mode": "蒙版的哪一部分需要重绘",
        "help mask_blur": "蒙版边缘的柔和程度（像素）",
        "help mask_padding": "只处理蒙版区域及其周围这么多像素",
        "help mask_fill": "蒙版部分最初的内容",
        "help outpaint_left": "在左侧增加的像素",
        "help outpaint_right": "在右侧增加的像素",
        "help outpaint_top": "在上方增加的像素",
        "help outpaint_bottom": "在下方增加的像素",
        "help outpaint_steps": "分几轮扩展",
        "help hires_scale": "以这么多倍的尺寸再画一遍，1 表示不画",
        "help hires_upscaler": "第二遍之前用什么放大",
        "help hires_steps": "第二遍的去噪步数，留空则与第一遍相同",
        "help hires_strength": "第二遍重绘的程度",
        "help hires_scheduler": "第二遍的采样器，留空则与第一遍相同",
        "help hires_guidance_scale": "第二遍遵循提示词的程度，留空则与第一遍相同",
        "help hires_tile": "第二遍逐块进行时每块的边长（像素），0 表示整幅",
        "help denoise_tile": "每一步融合的分块边长，0 表示不分块，留空则由计划决定",
    },
}


def language_of(accepted: str | None) -> str:
    """The language for a browser's `Accept-Language`: the first one in it that is spoken here."""
    for part in (accepted or "").split(","):
        tag = part.partition(";")[0].strip().casefold()
        if tag.startswith("zh"):
            return CHINESE
        if tag.startswith("en"):
            return ENGLISH
    return ENGLISH


def say(language: str, key: str, **values: object) -> str:
    """A text with its values filled in."""
    return TEXTS[language][key].format(**values)


def translations() -> gr.I18n:
    """All texts for the browser; `zh` is for one that does not name a country."""
    english, chinese = _whole(ENGLISH), _whole(CHINESE)
    return gr.I18n(**{ENGLISH: english, CHINESE: chinese, "zh": chinese})


def label_key(asked: Field[Any]) -> str:
    """The key of a field's label."""
    return f"label {asked.name}"


def help_key(asked: Field[Any]) -> str:
    """The key of a field's help, with what is allowed."""
    return f"help {asked.name}"


def _whole(language: str) -> dict[str, str]:
    """The texts with those of the fields, which English takes from the fields."""
    texts = dict(TEXTS[language])
    for asked in fields(Request):
        if language == ENGLISH:
            texts[label_key(asked)] = asked.name.replace("_", " ").capitalize()
            texts[help_key(asked)] = _sentence(limits_of(asked).help)
        allowed = _allowed(language, asked)
        if allowed:
            told = texts[help_key(asked)]
            texts[help_key(asked)] = say(language, "allowed", help=told, allowed=allowed)
    return texts


def _allowed(language: str, asked: Field[Any]) -> str:
    limits = limits_of(asked)
    said = []
    if limits.minimum is not None:
        top = "2⁶⁴−1" if limits.maximum == SEED_MAX else limits.maximum
        said.append(say(language, "range", minimum=limits.minimum, maximum=top))
    if limits.multiple_of is not None:
        said.append(say(language, "multiples", multiple_of=limits.multiple_of))
    if asked.name in _OWN and asked.default is None and asked.name != "seed":
        said.append(say(language, "blank"))
    return say(language, "and").join(said)


_OWN: Final = frozenset(f.name for f in fields(Job) if f.default is MISSING)
"""What every job has, so that a model has its own where a request says nothing."""


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
