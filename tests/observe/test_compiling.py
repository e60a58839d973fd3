"""What torch.compile did, in words."""

import pytest

from shoal.observe.compiling import (
    Compilation,
    Reason,
    Recompiled,
    compiled_words,
    is_limit_reached,
    reason_of,
    seconds_of,
)

GUARDS = {
    "0/0: tensor 'inputs' size mismatch at index 0. expected 64, actual 44": (
        "a batch of another shape: dimension 0 of inputs was 64, then 44",
        "mark_dynamic",
    ),
    "1/0: tensor 'x' rank mismatch. expected 2, actual 3": ("x had 2 dimensions, then 3", "same shape"),
    "1/2: tensor 'x' dtype mismatch. expected Float, actual Half": ("x was Float, then Half", "one kind"),
    "1/2: tensor 'x' stride mismatch at index 0. expected 8, actual 1": (
        "x lies in memory in another order",
        "one kind",
    ),
    "0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0": ("x needs a gradient in some", "one kind"),
    "0/2: GLOBAL_STATE changed: grad_mode ": ("gradients were turned on or off", "one place"),
    "0/2: GLOBAL_STATE changed: num_threads ": ("a setting of PyTorch changed: num_threads", "one place"),
    "3/1: self.drop.training == True  # if self.training:  # model.py:3 in f": ("a module was switched", "one place"),
    "0/0: 2 <= x.size()[0]   # y = x + 1": ("a batch of another shape: 2 <= x.size()[0]", "same shape"),
    "4/2: s == 'c'     # def h(x, s): return x  # probe.py:41 in h\nUser stack trace:\n  ...": ("s == 'c'", "tensor"),
    "": ("PyTorch does not say why", ""),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_reason_is_told_in_words_with_what_to_do(guard: str) -> None:
    words, advice = GUARDS[guard]
    reason = reason_of(guard)
    assert words in reason.words and advice in reason.advice
    assert ";" not in reason.words and "\n" not in reason.words


def test_a_long_reason_is_cut() -> None:
    assert len(reason_of(f"0/0: {'x' * 500} == 1").words) == 120


def test_a_function_is_named_as_its_author_would() -> None:
    assert Compilation(function="forward", file="/home/me/model.py", line=31).where == "forward (model.py:31)"
    resumed = Compilation(function="torch_dynamo_resume_in_forward_at_33", file="/home/me/model.py", line=30)
    assert resumed.where == "the rest of forward (model.py:30)"
    wrapped = Compilation(function="inner", file="/lib/site-packages/torch/_dynamo/external_utils.py", line=67)
    assert wrapped.where == Compilation().where == "the model"


def test_time_in_which_two_things_were_compiled_counts_once() -> None:
    parts = [Compilation(began=5.0, ended=6.0), Compilation(began=1.0, ended=3.0), Compilation(began=2.0, ended=4.0)]
    assert seconds_of(parts) == pytest.approx(4.0)
    assert seconds_of([]) == 0.0


def test_what_was_compiled_in_a_line() -> None:
    forward = Compilation(num_operations=3, began=1.0, ended=12.0, misses=1)
    backward = Compilation(is_forward=False, began=12.0, ended=13.0, misses=1)
    assert (
        compiled_words([forward, backward], "training", [])
        == "compiled for training in 12.0 s: 1 graph, none of 2 pieces of code from the cache"
    )
    cached = [Compilation(num_operations=1, ended=0.5, hits=1), Compilation(num_operations=1, ended=0.5, hits=2)]
    words = compiled_words(cached, "evaluation", ["Call to print", "Call to input"])
    assert words.endswith(": 2 graphs, all of 3 pieces of code from the cache, 2 graph breaks (Call to print)")
    assert ", 1 of 2 pieces" in compiled_words([Compilation(hits=1, misses=1)], "training", [])
    assert "cache" not in compiled_words([Compilation(num_operations=1)], "training", [])


@pytest.mark.parametrize(
    "failure", ["Dynamo recompile limit exceeded\n  Explanation: ...", "cache_size_limit exceeded"]
)
def test_giving_up_is_told_from_other_failures(failure: str) -> None:
    assert is_limit_reached(failure) and Compilation(failure=failure).is_limit
    assert not is_limit_reached("Unsupported: call to print\nrecompile limit exceeded")


def test_recompilations_add_up_and_the_newest_reason_is_told() -> None:
    first = Recompiled(1, 1.0, Reason("old", "do this"))
    both = first.and_then(Recompiled(2, 3.0, Reason("new", "do that")))
    assert both.words == "3 recompilations took 4.0 s (new)" and both.advice == "do that; or train.compile=false"
    gave_up = both.and_then(Recompiled(given_up="f (m.py:1)"))
    assert (
        gave_up.words == f"{both.words}, and PyTorch has given up compiling f (m.py:1) anew: what fits no version "
        "of it runs uncompiled"
    )
    assert not Recompiled() and both and Recompiled(given_up="f")
    other = Recompiled(4, 9.0, rank=3)
    assert other.words == "4 recompilations of worker 3 took 9.0 s" and "TORCH_LOGS" in other.advice
