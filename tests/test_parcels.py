"""How parameters are put together to be sent: `test_tensor_parallel` sends some, in many parcels."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.bench.flags import shape_of
from jaxlamina.models import abstract_params
from jaxlamina.ranks import parcels as p

SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "int8"])
LIKES = st.dictionaries(
    st.text("ab.1", min_size=1),
    st.builds(lambda shape, dtype: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)), SHAPES, DTYPES),
)


def n_bytes(like, names):
    return sum(like[name].size * like[name].dtype.itemsize for name in names)


@given(like=LIKES, most=st.integers(1, 10_000), seed=st.integers(0, 99))
def test_each_parameter_goes_once_in_parcels_that_both_ends_find(like, most, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p, "MOST_BYTES", most)
        found = list(p.parcels(like))
        shuffled = [[*like][i] for i in np.random.default_rng(seed).permutation(len(like))]
        assert list(p.parcels({name: like[name] for name in shuffled})) == found
    assert sorted(name for names in found for name in names) == sorted(like)
    assert all(len(names) == 1 or n_bytes(like, names) <= most for names in found)
    # None could have taken in what begins the next one.
    assert all(n_bytes(like, [*a, b[0]]) > most for a, b in itertools.pairwise(found))


def test_a_large_models_parcels_are_few_kinds():
    like = abstract_params(shape_of("llama-3-70b", None), jax.numpy.bfloat16)
    kinds = {tuple(like[name].shape for name in names) for names in p.parcels(like)}
    assert n_bytes(like, like) > 140e9 and len(kinds) < 20
