"""The records of other tools, and how each becomes the fields of a request.

Start at `records.py`, which tells the tools apart; each tool or form has a module of its own. A
reader gives a `Reading`: the fields that it found, what it cannot use and why, and what is only
worth knowing. Nothing that a record says is dropped without a word, and where a value cannot be
read no default takes its place. Nothing here runs, opens or fetches what a record names.
"""
