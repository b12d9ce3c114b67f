"""Routers that find the primitives: `lol toy discover`.

`config` says what decides a discovery, `instruction` what a choice of a path may depend on, `train` explores and
settles, `crossfit` repairs paths in between, `beyond` and `runs` name the rows, `table` and `figures` set
them side by side.
"""
