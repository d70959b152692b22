"""The words of the UI in English and Simplified Chinese; the language is the browser's.

What is on the page from the start is looked up in the browser (`gr.I18n`); what is said later, with
figures in it, is looked up here. Labels and help of the request's fields are English by nature:
they are the names and help of the fields themselves.
"""

from dataclasses import Field, fields
from typing import Any, Final

import gradio as gr

from sdamd.request import SEED_MAX, Request, limits_of

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
    if asked.default is None and asked.name != "seed":
        said.append(say(language, "blank"))
    return say(language, "and").join(said)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
