r"""The template language: one text that stands for many prompts.

    {red|blue} {3::red|blue|}      one of them; the first three times as often; nothing is one too
    {2$$a|b|c} {1-2$$a|b} {-2$$..} two of them in any order, none twice; one or two; up to two
    {2$$ and $$a|b|c}              what stands between them; without it a comma
    __colours__ __clothes/*__      a line of `colours.txt` in the wildcards folder; of any file in
                                   `clothes`; YAML and JSON as `template.wildcards` says
    ${x={a|b}} ${x} ${x:else}      a variable, drawn again at each use; what to say if it is not set
    ${x=!{a|b}} ${x?=a}            drawn once for all uses; set only if it is not set yet
    __coat(season=winter)__        `${season}` is `winter` in the lines of `coat.txt`
    %{a photo of ...$$__animal__}  the second text in the place of the dots of the first
    {~a|b} {!a|b} {@a|b} __@x__    at random, all of them, in turn, whatever the mode is
    \{ \| \} \$ \% \_              the character itself

Only a text that holds such a choice is a template (`is_template`). Any other is left as it is,
letter for letter, so that `{word}`, `{{word}}`, JSON and `:}` in old prompts stay what they were.
In a template `{word}` is a choice of one and becomes `word`, and a `{` that is not closed is an
error. A bar within square brackets belongs to them: `[a|b]` is the prompt's alternation. In a
`<lora:..>` tag a wildcard must fill a whole argument, so that names with `__` stay names. Bare
`%` and `$` are letters, and so is `#`: comments are for lines of wildcard files. Blanks stay as
they are written. The language is that of the dynamicprompts package where this does not say
otherwise; a wildcard that is not there is an error here and not a word.

Nothing is left to chance: at random means decided by the picture's seed, and the same template,
wildcard files and seed give the same text on every machine. In the combinatorial mode a variable
that is drawn once has its first value, and a line of weight 3 comes three times.

Time and memory grow with the length of the text and the size of the files, not with the number
of combinations: each is made from its number.
"""

from sdamd.template.making import COUNTED, LETTERS_MAX, Mode, Template
from sdamd.template.syntax import NESTING_MAX, Choice, is_template
from sdamd.template.wildcards import Wildcards

__all__ = [
    "COUNTED",
    "LETTERS_MAX",
    "NESTING_MAX",
    "Choice",
    "Mode",
    "Template",
    "Wildcards",
    "is_template",
]
