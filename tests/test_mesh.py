"""The mesh: every way to write it gives the same plain data; each mistake its own message."""

import doctest
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autoparallel_fp8 import mesh as mesh_module
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.mesh import Mesh, MeshAxis, parse_mesh

WANTED = Mesh((MeshAxis("dp", 2), MeshAxis("tp", 4)))


def device_mesh(sizes, names, ranks=None):
    """Has what `parse_mesh` reads of a torch DeviceMesh."""
    ranks = torch.arange(int(np.prod(sizes))) if ranks is None else torch.tensor(ranks)
    return SimpleNamespace(mesh=ranks.reshape(sizes), mesh_dim_names=names)


@pytest.mark.parametrize(
    "value",
    [
        *("dp=2,tp=4", " dp = 2 , tp=4 ", {"dp": 2, "tp": 4}, {"dp": np.int64(2), "tp": 4}),
        *(WANTED, device_mesh((2, 4), ("dp", "tp")), device_mesh((2, 4), ("dp", "tp"), list(range(8, 16)))),
    ],
)
def test_ways_to_write_a_mesh(value):
    """Text, mapping, DeviceMesh and Mesh all give the same mesh, which prints as the text."""
    assert parse_mesh(value) == WANTED
    assert str(parse_mesh(value)) == "dp=2,tp=4"


@pytest.mark.parametrize("value", [(2, 4), [2, 4], torch.Size((2, 4)), device_mesh((2, 4), None)])
def test_axes_without_names_are_numbered(value):
    """Sizes alone get the names axis0, axis1."""
    assert str(parse_mesh(value)) == "axis0=2,axis1=4"


def test_a_torch_device_mesh():
    """What `init_device_mesh` makes is taken, with and without names; a strided slice of it is not."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=fake.FakeStore())
    try:
        from torch.distributed.device_mesh import init_device_mesh

        named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert parse_mesh(named) == WANTED
        assert str(parse_mesh(named["tp"])) == "tp=4"
        with pytest.raises(UsageError, match="does not number its ranks row by row"):
            parse_mesh(named["dp"])
        assert str(parse_mesh(init_device_mesh("cpu", (8,)))) == "axis0=8"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "the mesh has no axis"),
        ({}, "the mesh has no axis"),
        ((), "the mesh has no axis"),
        ("dp", r'"dp" is not name=size\n  at: mesh "dp"\n  do: write the mesh as "dp=8,tp=8"'),
        ("dp=2,", r'"" is not name=size'),
        ("dp=two", r'"dp=two" is not name=size'),
        ("dp=2.5", r'"dp=2.5" is not name=size'),
        ("8x8", r'"8x8" is not name=size'),
        ("dp=0", r'axis "dp" has size 0\n.*\n  do: every size must be 1 or more'),
        ("dp=-8", r'axis "dp" has size -8'),
        ({"dp": True}, r'axis "dp" has size True, not a whole number'),
        ({"dp": "8"}, r"axis \"dp\" has size '8', not a whole number"),
        ((2, 4.0), r'axis "axis1" has size 4.0, not a whole number'),
        ("dp=2,dp=4", r'two axes are named "dp"'),
        ("=2", r"'' is no name for a mesh axis"),
        ({1: 2}, r"1 is no name for a mesh axis"),
        ({"a b": 2}, r"'a b' is no name for a mesh axis"),
        (8, "a mesh cannot be made of int"),
        (None, "a mesh cannot be made of NoneType"),
        (device_mesh((2, 2), ("a", "b"), [0, 2, 1, 3]), "does not number its ranks row by row"),
    ],
)
def test_mistakes(value, message):
    """Each mistake is a UsageError that says what was wrong and how a mesh is written."""
    with pytest.raises(UsageError, match=message):
        parse_mesh(value)


def test_ranks_are_row_major():
    """The last axis is contiguous; strides, sizes, positions and axes go by name."""
    mesh = parse_mesh("pp=2,dp=3,tp=4")
    assert mesh.num_devices == 24
    assert [mesh.stride(name) for name in mesh.names] == [12, 4, 1]
    assert mesh.stride(mesh.axis("dp")) == 4
    assert mesh.index("dp") == 1 and mesh.axis("dp") == MeshAxis("dp", 3) and str(mesh.axis("dp")) == "dp=3"
    ranks = np.arange(24).reshape(mesh.sizes)
    assert ranks[0, 1, 0] - ranks[0, 0, 0] == mesh.stride("dp")


def test_unknown_axis():
    """An axis that is not there is told with the mesh and its axes."""
    with pytest.raises(
        UsageError, match=r'no axis is named "ddp"\n  at: mesh dp=2,tp=4\n  do: did you mean dp\? axes: dp, tp'
    ):
        WANTED.index("ddp")
    with pytest.raises(UsageError, match=r'no axis is named "dp"'):
        parse_mesh("tp=4").stride(MeshAxis("dp", 2))


def test_a_mesh_is_a_value():
    """Equal meshes are equal keys."""
    assert len({WANTED, parse_mesh("dp=2,tp=4"), parse_mesh("tp=4,dp=2")}) == 2


def test_doc_examples_run():
    """The examples in the docstrings print what they say."""
    assert doctest.testmod(mesh_module).failed == 0
