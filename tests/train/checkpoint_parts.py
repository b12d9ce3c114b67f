"""A small real model, optimizer and tokenizer for the checkpoint tests; as a program, the kill test's other process.

checkpoint_parts.py RUN     save is killed at each of its file operations in turn
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lol.train.checkpoint import find_damage, load_checkpoint, newest_checkpoint, save_checkpoint

VOCABULARY = 16


def make_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(fields | changes)))


def make_optimizer(model: LlamaForCausalLM, lr: float = 1e-2) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {chr(ord("a") + i): i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])))


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> float:
    """One step on tokens from the global generator, so that its state matters."""
    tokens = torch.randint(VOCABULARY, (2, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Saver:
    """Saves checkpoints whose every number is their step, so that a mixture of two would show."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.tokenizer = make_tokenizer()
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        train_step(self.model, self.optimizer)

    def save(self, step: int, keep: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
                self.optimizer.state[parameter]["exp_avg"].fill_(step)
        save_checkpoint(self.run, step, self.model, self.optimizer, {"step": step}, self.tokenizer, keep)

    def newest(self) -> int:
        """Step of the newest checkpoint, after loading it and comparing every number."""
        warnings: list[str] = []
        for path in (self.run / "checkpoints").glob("step-*"):
            assert find_damage(path) is None, f"{path}: {find_damage(path)}"
        path = newest_checkpoint(self.run, warnings.append)
        assert path is not None, warnings
        assert not warnings, warnings
        step = load_checkpoint(path, self.model, self.optimizer)["step"]
        for parameter in self.model.parameters():
            assert torch.all(parameter == step), (path, step)
            assert torch.all(self.optimizer.state[parameter]["exp_avg"] == step), (path, step)
        return step


def in_child(work: Callable[[], object]) -> int:
    """Start a forked copy of this process; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print("child:", repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def die_at(operation: int) -> None:
    """Kill this process at the given file operation from now on (Python announces each one before it happens)."""
    left = operation

    def count(event: str, _arguments: object) -> None:
        nonlocal left
        if event.split(".")[0] in ("open", "os", "shutil"):
            left -= 1
            if left == -1:  # once: the kill is announced too
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def sweep(run: Path, old: int, new: int) -> None:
    """With `old` on the disk and keep=1, kill the save of `new` at operation 0, 1, 2, … until one gets through."""
    seen = set()
    for operation in range(1000):
        saver = Saver(run / f"{old}-{new}-{operation}")
        saver.save(old, keep=1)

        def doomed(saver: Saver = saver, operation: int = operation) -> None:
            die_at(operation)
            saver.save(new, keep=1)

        _, status = os.waitpid(in_child(doomed), 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), status
        seen.add(saver.newest())
        saver.save(new + 1, keep=1)
        assert [path.name for path in (saver.run / "checkpoints").iterdir()] == [f"step-{new + 1:08d}"]
        if status == 0:
            break
    print(f"killed at {operation} operations; newest afterwards: {sorted(seen)}")
    assert operation > 30
    assert seen == {old, new}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sweep(Path(sys.argv[1]), old=1, new=2)
    sweep(Path(sys.argv[1]), old=2, new=2)
