"""Verbs that do and time experiments: the toy, the article's experiments, benches."""

from dataclasses import dataclass

from lol import flags
from lol.verbs.shared import write_numbers


def toy_run(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyRun
    from lol.experiments.toy.runs import toy_run as run_toy

    if args and not args[0].startswith("-"):
        args = ["--model", *args]
    run_toy(flags.parse(ToyRun, "toy run", args))
    return 0


def toy_all(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyAll
    from lol.experiments.toy.runs import toy_all as run_all

    return 1 if run_all(flags.parse(ToyAll, "toy all", args)) else 0


def toy_discover(args: list[str]) -> int:
    from lol.experiments.toy.discovery.runs import ToyDiscover
    from lol.experiments.toy.discovery.runs import toy_discover as run_discovery

    return 1 if run_discovery(flags.parse(ToyDiscover, "toy discover", args)) else 0


def toy_table(args: list[str]) -> int:
    from lol.experiments.toy.table import ToyTable
    from lol.experiments.toy.table import toy_table as write_table

    print(write_table(flags.parse(ToyTable, "toy table", args)))
    return 0


def toy_play(args: list[str]) -> int:
    from lol.experiments.toy.play import ToyPlay
    from lol.experiments.toy.play import play as run_play

    run_play(flags.parse(ToyPlay, "toy play", args))
    return 0


def toy_codes(args: list[str]) -> int:
    from lol.experiments.toy.codes import ToyCodes
    from lol.experiments.toy.codes import toy_codes as read_codes

    return write_numbers(flags.parse(ToyCodes, "toy codes", args), read_codes)


@dataclass(frozen=True)
class ExperimentList:
    """Print the article's experiments: what each is, the data that it wants, what was published."""


def experiment_list(args: list[str]) -> int:
    from lol.experiments.registry import list_experiments

    flags.parse(ExperimentList, "experiment list", args)
    list_experiments()
    return 0


def experiment(args: list[str]) -> int:
    from lol.experiments.harness import Options
    from lol.experiments.registry import experiment as run_experiment

    run_experiment(flags.parse(Options, "experiment", args))
    return 0


def bench_core(args: list[str]) -> int:
    from lol.bench.core import BenchCore, bench

    return write_numbers(flags.parse(BenchCore, "bench core", args), bench)


def bench_toy(args: list[str]) -> int:
    from lol.bench.toy import BenchToy, bench

    return write_numbers(flags.parse(BenchToy, "bench toy", args), bench)


def bench_decode(args: list[str]) -> int:
    from lol.bench.decode import BenchDecode, bench

    return write_numbers(flags.parse(BenchDecode, "bench decode", args), bench)


def bench_train(args: list[str]) -> int:
    from lol.bench.train import BenchTrain, bench

    return write_numbers(flags.parse(BenchTrain, "bench train", args), bench)


def bench_gpu(args: list[str]) -> int:
    from lol.bench.gpu import BenchGpu, bench

    command = flags.parse(BenchGpu, "bench gpu", args)
    result = bench(command)
    write_numbers(command, lambda _: result)
    return int(bool(result and result["failed"]))
