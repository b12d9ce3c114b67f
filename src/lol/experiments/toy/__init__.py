"""The toy laboratory: digits, programs of primitives, and what a router makes of them. (Article, both rounds.)

task.py      primitives, programs, the splits        config.py   a run's settings, and the article's models
model.py     the encoder, from the library's parts   train.py    a run, from its seed to its record
torch_blocks.py   torch's encoder layers in their place               line.py     runs side by side
runs.py      which runs there are and which are done                play.py    a trained run, by hand
discover.py  routers that find the primitives        discover_config.py  their settings
instruction.py  what such a router reads             crossfit.py  routes repaired by fresh libraries
discover_runs.py  each by name                       beyond.py  with parts taken away, or more asked of it
table.py     tables and figures of all of them       records.py   orderings.py   figures.py   discover_table.py
"""
