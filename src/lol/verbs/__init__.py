"""What each verb of `lol` does with its flags: it calls the part of the package that does the work."""

from collections.abc import Callable
from functools import partial

from lol.verbs import experiments, models, text

VERBS: dict[tuple[str, ...], Callable[[list[str]], int]] = {
    ("train",): models.train,
    ("watch",): models.watch,
    ("recipe", "list"): models.recipe_list,
    ("recipe", "show"): models.recipe_show,
    ("generate",): text.generate,
    ("serve",): text.serve,
    ("studio",): text.studio,
    ("paths", "show"): text.paths_show,
    ("paths", "report"): text.paths_report,
    ("paths", "utilisation"): partial(text.paths_tool, "utilisation"),
    ("paths", "map"): partial(text.paths_tool, "map"),
    ("paths", "probe"): partial(text.paths_tool, "probe"),
    ("paths", "mode"): partial(text.paths_tool, "mode"),
    ("paths", "force"): partial(text.paths_tool, "force"),
    ("export",): models.export,
    ("tokenizer",): models.tokenizer,
    ("cost",): models.cost,
    ("toy", "run"): experiments.toy_run,
    ("toy", "all"): experiments.toy_all,
    ("toy", "discover"): experiments.toy_discover,
    ("toy", "table"): experiments.toy_table,
    ("toy", "play"): experiments.toy_play,
    ("toy", "codes"): experiments.toy_codes,
    ("experiment", "list"): experiments.experiment_list,
    ("experiment",): experiments.experiment,
    ("bench", "core"): experiments.bench_core,
    ("bench", "decode"): experiments.bench_decode,
    ("bench", "train"): experiments.bench_train,
    ("bench", "gpu"): experiments.bench_gpu,
    ("bench", "toy"): experiments.bench_toy,
}
