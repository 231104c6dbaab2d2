"""The stored model of tests/data against the log-probabilities that torch gave it: parity where torch is absent."""

import numpy as np

from tests.tiny_models import TINY_LLAMA, load_model, log_probs


def test_log_probs_equal_the_stored_ones() -> None:
    with np.load(TINY_LLAMA / "golden.npz", allow_pickle=False) as golden:
        tokens, expected = golden["tokens"], golden["log_probs"]
    model = load_model(TINY_LLAMA)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    found = log_probs(model, tokens[None])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    # The weights must matter: a uniform distribution would be within reach of a loose bound.
    assert expected.max(axis=-1).mean() > np.log(1 / 264) + 3
