import pytest

from shoal.core.secrets import scrub


@pytest.mark.parametrize(
    ("text", "scrubbed"),
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
        # what is none
        ("num_tokens=512 tokens_per_s: 1024.5", "num_tokens=512 tokens_per_s: 1024.5"),
        ("password: ${env:DB_PASSWORD}", "password: ${env:DB_PASSWORD}"),
        ("token: null", "token: null"),
        ("data.tokenizer: 'bpe.json' is not there", "data.tokenizer: 'bpe.json' is not there"),
        ("http://host:8265/a@b", "http://host:8265/a@b"),
        ("worker 1: killed by SIGKILL; see events.jsonl", "worker 1: killed by SIGKILL; see events.jsonl"),
    ],
)
def test_what_looks_like_a_secret_is_not_shown(text: str, scrubbed: str) -> None:
    assert scrub(text) == scrubbed
    assert scrub(scrubbed) == scrubbed, "once is enough"
