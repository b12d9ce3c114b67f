"""The toy laboratory: digits, programs of primitives, and what a router makes of them. (Article, both rounds.)

task.py      primitives, programs, the splits         config.py   a run's settings, and the article's models
model.py     the encoder, from the library's parts    train.py    a run, from its seed to its record
torch_blocks.py   torch's encoder layers in their place            process.py   one thread, memory that is kept
runs.py      which runs there are and which are done               line.py      runs side by side
discovery/   routers that find the primitives                      play.py      a trained run, by hand
codes.py     what its states say between blocks
table.py     tables and figures of all of them        records.py   orderings.py   figures.py
"""
