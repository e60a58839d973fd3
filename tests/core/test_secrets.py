import time

import pytest

from shoal.core.secrets import scrub, scrubbed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/path", "http://***@host:5000/path"),
        (
            "sqlite:////tmp/x.db and postgresql+psycopg://u:p%40ss@db/x",
            "sqlite:////tmp/x.db and postgresql+psycopg://***@db/x",
        ),
        ("https://token@host/x", "https://***@host/x"),
        ("GET /?token=abc123def&x=1", "GET /?token=***&x=1"),
        ("MLFLOW_TRACKING_PASSWORD=hunter2 failed", "MLFLOW_TRACKING_PASSWORD=*** failed"),
        ('{"api_key": "abc-def", "x": 1}', '{"api_key": "***", "x": 1}'),
        ("Authorization: Bearer eyJhbGciOi.abc.def", "Authorization: Bearer ***"),
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY: ***"),
        ("key AKIAIOSFODNN7EXAMPLE was refused", "key *** was refused"),
        ("s3://bucket/k?X-Amz-Signature=abcdef", "s3://bucket/k?X-Amz-Signature=***"),
        ("https://u:p@ss@host/x", "https://***@host/x"),
        ("https://u:p/ss@host", "https://***@host"),
        ("password=123456 pwd=ab,cd", "password=*** pwd=***"),
        ("password: 'two words' and DB_PASS=x1", "password: '***' and DB_PASS=***"),
        (
            "AccountKey=abc== passphrase=x private_key=y auth=z",
            "AccountKey=*** passphrase=*** private_key=*** auth=***",
        ),
        ("Authorization: token 0123456789abcdef", "Authorization: token ***"),
        ("a eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.c2ln b xoxb-123456789012", "a *** b ***"),
        ("token:\n  value: x", "token:\n  value: x"),
        # what is none
        ("num_tokens=512 tokens_per_s: 1024.5", "num_tokens=512 tokens_per_s: 1024.5"),
        ("password: ${env:DB_PASSWORD}", "password: ${env:DB_PASSWORD}"),
        ("token: null", "token: null"),
        ("data.tokenizer: 'bpe.json' is not there", "data.tokenizer: 'bpe.json' is not there"),
        ("http://host:8265/a@b", "http://host:8265/a@b"),
        ("worker 1: killed by SIGKILL; see events.jsonl", "worker 1: killed by SIGKILL; see events.jsonl"),
    ],
)
def test_what_looks_like_a_secret_is_not_shown(text: str, shown: str) -> None:
    assert scrub(text) == shown
    assert scrub(shown) == shown, "once is enough"


def test_what_has_the_name_of_a_secret_is_none_of_anybodys_business() -> None:
    tree = {
        "task": {"args": {"api_key": "x", "password": 1234, "tokens": ["a", "b"], "token": {"value": "c"}}},
        "model": {"num_tokens": 512, "eos_token": 2, "token": None, "secret": "${env:S}", "use_auth": True},
        "uri": "http://u:p@host",
    }
    hidden = {"api_key": "***", "password": "***", "tokens": "***", "token": "***"}
    assert scrubbed(tree) == {"task": {"args": hidden}, "model": tree["model"], "uri": "http://***@host"}


def test_long_texts_are_done_quickly() -> None:
    began = time.perf_counter()
    for text in ("a" * 100_000, "password" * 10_000, "http://" + "a:" * 50_000, "token " * 20_000, "-" * 100_000):
        scrub(text)
    assert time.perf_counter() - began < 2.0
