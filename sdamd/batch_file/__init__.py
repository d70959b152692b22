"""Batches: rows of files, folders and stdin, and the requests that they become.

    .jsonl .ndjson    one JSON object a line
    .json             one list of objects
    .csv .tsv         a header of field names; commas, semicolons or tabs; quotes as in RFC 4180
    .toml             tables [[job]], and [defaults] for all of them
    .txt              every line that is not blank is a prompt, letter for letter: no comments,
                      no quotes and no flags are read in it
    a folder          each picture in it becomes an init image, in the order of the names
    a folder, RECORDS each picture in it is made again from its record
    - (stdin)         JSONL if its first line is an object, else lines

A row gives any fields of a request, by their names. What it leaves open comes from `defaults`
(flags), then from [defaults]. Text is UTF-8, or UTF-16 with its mark. A row that is wrong is a
`Row` with its problems, and the others go on; what spoils the whole is raised.

`expand` then makes the rows of `--vary` and of templates. All is lazy: no list of rows is kept.
"""

from sdamd.batch_file.axes import Axis, parse_axes
from sdamd.batch_file.expansion import ROW_PICTURES_MAX, expand
from sdamd.batch_file.lines import ROW_MAX_BYTES
from sdamd.batch_file.rows import Row, strict
from sdamd.batch_file.source import Kind, read

__all__ = [
    "ROW_MAX_BYTES",
    "ROW_PICTURES_MAX",
    "Axis",
    "Kind",
    "Row",
    "expand",
    "parse_axes",
    "read",
    "strict",
]
