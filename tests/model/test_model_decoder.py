"""The native decoder against transformers' own logits, however the prompt is cut and batched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import NATIVE, PagedDriver, hf_logits, hf_model, prompt, save

from aserve.model.batch import LanguageModel
from aserve.model.decoder import Decoder
from aserve.model.loader import load_model
from aserve.model.reference import TILE

pytestmark = pytest.mark.torch

TOKENS = prompt(41)
FLOAT32 = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module", params=list(NATIVE))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    model_type, overrides = NATIVE[request.param]
    reference = hf_model(model_type, **overrides)
    yield reference, save(reference, tmp_path_factory.mktemp("family") / request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = hf_model("llama")
    return reference, save(reference, tmp_path_factory.mktemp("llama"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LanguageModel:
    return load_model(folder, dtype=dtype, **options)


def test_prompt_at_once_matches_transformers(family: tuple[Any, Path]) -> None:
    """Every family's logits over a whole prompt are transformers' within 1e-4, from the native decoder."""
    reference, folder = family
    model = load(folder)

    logits = PagedDriver(model).step(chunks={"a": TOKENS})["a"]

    assert isinstance(model, Decoder)
    torch.testing.assert_close(logits, hf_logits(reference, TOKENS), **FLOAT32)


def test_chunks_then_decode_match_transformers(family: tuple[Any, Path]) -> None:
    """Two chunks and then one token a step give the logits of the whole prompt."""
    reference, folder = family
    driver = PagedDriver(load(folder), block_size=4)

    parts = [driver.step(chunks={"a": TOKENS[:13]})["a"], driver.step(chunks={"a": TOKENS[13:30]})["a"]]
    parts += [driver.step(rows={"a": token})["a"] for token in TOKENS[30:]]

    torch.testing.assert_close(torch.cat(parts), hf_logits(reference, TOKENS), **FLOAT32)


def test_bfloat16_stays_near_float32(family: tuple[Any, Path]) -> None:
    """In bfloat16 the logits differ from float32's by at most a twentieth of their spread, root mean square."""
    reference, folder = family
    exact = hf_logits(reference, TOKENS)
    driver = PagedDriver(load(folder, torch.bfloat16), block_size=4)

    parts = [driver.step(chunks={"a": TOKENS[:30]})["a"], *(driver.step(rows={"a": t})["a"] for t in TOKENS[30:])]

    error = (torch.cat(parts) - exact).square().mean().sqrt() / exact.std()
    assert error < 0.05


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_mixed_batches_match_transformers_at_any_block_size(block_size: int, llama: tuple[Any, Path]) -> None:
    """Decode rows of unlike lengths, a first chunk and a later chunk in one step each get their own logits."""
    reference, folder = llama
    prompts = {"a": prompt(9, 1), "b": prompt(40, 2), "c": prompt(23, 3), "d": prompt(12, 4)}
    driver = PagedDriver(load(folder), block_size=block_size, max_blocks=48)
    driver.step(chunks={"a": prompts["a"][:8], "b": prompts["b"][:39]})
    driver.step(chunks={"c": prompts["c"][:10]})

    mixed = driver.step(
        rows={"b": prompts["b"][39], "a": prompts["a"][8]}, chunks={"c": prompts["c"][10:], "d": prompts["d"]}
    )

    expected = {name: hf_logits(reference, tokens) for name, tokens in prompts.items()}
    torch.testing.assert_close(mixed["a"], expected["a"][8:], **FLOAT32)
    torch.testing.assert_close(mixed["b"], expected["b"][39:], **FLOAT32)
    torch.testing.assert_close(mixed["c"], expected["c"][10:], **FLOAT32)
    torch.testing.assert_close(mixed["d"], expected["d"], **FLOAT32)


def test_only_wanted_rows_are_projected(llama: tuple[Any, Path]) -> None:
    """logit_rows picks and orders the rows of the result; a step that wants none gets none."""
    _, folder = llama
    driver = PagedDriver(load(folder))
    every = driver.step(chunks={"a": TOKENS})["a"]

    batch = families.one_chunk(TOKENS, logit_rows=[40, 3])
    none = families.one_chunk(TOKENS, logit_rows=[])

    torch.testing.assert_close(driver.model.forward(batch, driver.kv), every[[40, 3]], **FLOAT32)
    assert driver.model.forward(none, driver.kv).shape == (0, families.VOCAB_SIZE)


def test_weight_bytes_count_tied_embeddings_once(tmp_path: Path) -> None:
    """weight_bytes is the size of the parameters that transformers counts."""
    reference = hf_model("llama", tie_word_embeddings=True, num_attention_heads=6)

    model = load(save(reference, tmp_path))

    assert model.weight_bytes == 4 * reference.num_parameters()


def test_reference_logits_do_not_depend_on_the_batch(family: tuple[Any, Path]) -> None:
    """In reference mode a row's logits are equal to the bit alone and among others, chunked anyhow, decoded or not."""
    _, folder = family
    model = load(folder, reference=True)
    others = {f"o{i}": prompt(5 + 3 * i, 10 + i) for i in range(17)}
    alone = PagedDriver(model, block_size=4).step(chunks={"a": TOKENS})["a"]
    driver = PagedDriver(model, block_size=16, num_blocks=200)

    crowded = [driver.step(chunks={**others, "a": TOKENS[:7]})["a"]]
    crowded.append(driver.step(rows={"o3": 5}, chunks={"a": TOKENS[7:34], "p": TOKENS})["a"])
    rows = {f"o{i}": 4 + i for i in range(17)}
    crowded += [driver.step(rows={**rows, "a": token})["a"] for token in TOKENS[34:]]

    assert torch.equal(torch.cat(crowded), alone)


def test_reference_matches_transformers(family: tuple[Any, Path]) -> None:
    """Reference mode computes the same model."""
    reference, folder = family

    logits = PagedDriver(load(folder, torch.bfloat16, reference=True)).step(chunks={"a": TOKENS})["a"]

    torch.testing.assert_close(logits, hf_logits(reference, TOKENS), **FLOAT32)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 960), (1536, 576), (100, 36)])
def test_a_row_of_a_tile_does_not_depend_on_its_place(num_threads: int, num_inputs: int, num_outputs: int) -> None:
    """What reference mode stands on: in a product of TILE rows a row's result is the same at every place."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    row = torch.randn(num_inputs, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        results = []
        for place in range(TILE):
            tile = torch.randn(TILE, num_inputs, generator=generator)
            tile[place] = row
            results.append(torch.nn.functional.linear(tile, weight)[place])
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(result, results[0]) for result in results)
