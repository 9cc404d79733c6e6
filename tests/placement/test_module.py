"""Modules declare their parameters; declarations are checked, and initial values are identical on every layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megastack.errors import PlacementError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import ParallelModule, initialise_, placements_of
from megastack.placement.placement import Normal, Ones, Placement, Shard, Zeros

HIDDEN, FFN = 8, 12


def mesh_at(rank: int = 0, **degrees: int) -> Mesh:
    """A rank's view of a mesh without process groups: placements never communicate."""
    return Mesh(MeshShape(**degrees), rank, torch.device("cpu"), None)


class Scale(ParallelModule):
    """A replicated parameter."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((HIDDEN,), partial=frozenset({Axis.TP}), init=Ones(), decay=False)}


class Columns(ParallelModule):
    """A weight and a bias sharded over tp."""

    def __init__(self, mesh: Mesh, rows: int = FFN) -> None:
        super().__init__(mesh)
        self.rows = rows
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        shards = {Axis.TP: Shard(0)}
        return {
            "weight": Placement((self.rows, HIDDEN), shards),
            "bias": Placement((self.rows,), shards, init=Zeros(), decay=False),
        }


class Vocabulary(ParallelModule):
    """An embedding whose rows are padded."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((5, HIDDEN), {Axis.TP: Shard(0)}, padded_shape=(8, HIDDEN))}


class Foreign(ParallelModule):
    """A plain module inside, declared by dotted names."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {
            "gain": Placement((1,), init=Ones()),
            "inner.weight": Placement((HIDDEN, HIDDEN), init=Normal(0.5)),
            "inner.bias": Placement((HIDDEN,), init=Zeros()),
        }


class Model(nn.Module):
    """Blocks keyed by their global layer numbers, a plain container around modules that declare."""

    def __init__(self, mesh: Mesh, layers: range = range(2), tied: bool = False) -> None:
        super().__init__()
        self.embedding = Vocabulary(mesh)
        self.blocks = nn.ModuleDict(
            {str(layer): nn.ModuleDict({"norm": Scale(mesh), "up": Columns(mesh)}) for layer in layers}
        )
        self.head = self.embedding if tied else Vocabulary(mesh)
        self.foreign = Foreign(mesh)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nothing has written yet holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class TestParallelModule:
    def test_it_allocates_its_local_shapes_with_initial_values(self, poisoned_memory: None) -> None:
        layer = Columns(mesh_at(rank=1, tp=2))
        assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
            "weight": (FFN // 2, HIDDEN),
            "bias": (FFN // 2,),
        }
        assert layer.weight.requires_grad and layer.weight.isfinite().all() and not layer.bias.any()
        assert not torch.equal(layer.weight, Columns(mesh_at(rank=0, tp=2)).weight)

    def test_it_uses_the_default_dtype_and_device(self) -> None:
        with torch.device("meta"):
            assert Columns(mesh_at()).weight.is_meta
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert Columns(mesh_at()).weight.dtype == torch.float64
        finally:
            torch.set_default_dtype(before)

    def test_it_declares_nothing_and_has_no_boundary_by_default(self) -> None:
        bare = ParallelModule(mesh_at())
        assert bare.placements() == {} and bare.boundary() == ()

    def test_a_dim_that_the_mesh_does_not_divide_is_an_error_when_built(self) -> None:
        with pytest.raises(PlacementError, match=r"tp=5: .*use tp of 1, 2, 3, 4, 6 or 12"):
            Columns(mesh_at(tp=5))


class TestPlacementsOf:
    def test_names_are_those_of_the_model_with_global_layer_numbers(self) -> None:
        found = placements_of(Model(mesh_at(tp=2), layers=range(17, 19)))
        assert set(found) == {
            "embedding.weight",
            "blocks.17.norm.weight",
            "blocks.17.up.weight",
            "blocks.17.up.bias",
            "blocks.18.norm.weight",
            "blocks.18.up.weight",
            "blocks.18.up.bias",
            "head.weight",
            "foreign.gain",
            "foreign.inner.weight",
            "foreign.inner.bias",
        }
        assert found["blocks.18.norm.weight"].partial == {Axis.TP}
        assert found["foreign.inner.weight"].init == Normal(0.5)

    def test_a_module_alone_has_local_names(self) -> None:
        assert set(placements_of(Columns(mesh_at()))) == {"weight", "bias"}

    def test_a_tied_parameter_is_listed_once_under_its_first_name(self) -> None:
        model = Model(mesh_at(), tied=True)
        assert "embedding.weight" in placements_of(model) and "head.weight" not in placements_of(model)

        untied = Model(mesh_at())
        untied.head.weight = untied.embedding.weight
        assert "head.weight" not in placements_of(untied)

    def test_a_tied_parameter_has_the_declaration_of_any_module_that_holds_it(self) -> None:
        model = nn.Module()
        model.first = nn.Linear(HIDDEN, FFN, bias=False)
        model.second = Columns(mesh_at())
        model.first.weight = model.second.weight
        assert placements_of(model)["first.weight"] == model.second.placements()["weight"]

    def test_every_error_is_in_one_message(self) -> None:
        model = nn.Module()
        mesh = mesh_at(tp=2)
        model.plain = nn.Linear(2, 2)
        model.forgetful = Columns(mesh)
        del model.forgetful.bias
        model.forgetful.extra = nn.Parameter(torch.zeros(3))
        model.resized = Columns(mesh)
        model.resized.weight = nn.Parameter(torch.zeros(FFN, HIDDEN))
        model.uneven = Columns(mesh)
        model.uneven.rows = 7
        with pytest.raises(PlacementError) as error:
            placements_of(model)
        lines = str(error.value).splitlines()
        assert lines == [
            "forgetful.bias: declared, but the module has no such parameter or persistent buffer",
            "plain.weight: has no placement; declare it in placements() of the module that owns it",
            "plain.bias: has no placement; declare it in placements() of the module that owns it",
            "forgetful.extra: has no placement; declare it in placements() of the module that owns it",
            "resized.weight: its local shape is (12, 8), but its placement (12, 8) on tp2 gives (6, 8); "
            "allocate it with local_shape(placement, mesh.shape)",
            "uneven.weight: tp=2: must split dim 0 of (7, 8) into equal parts; use tp of 1 or 7",
            "uneven.bias: tp=2: must split dim 0 of (7,) into equal parts; use tp of 1 or 7",
        ]

    def test_different_declarations_of_one_parameter_are_an_error(self) -> None:
        model = Model(mesh_at())
        model.foreign.inner.weight = model.embedding.weight
        with pytest.raises(
            PlacementError, match=r"embedding.weight, foreign.inner.weight: one tied parameter with diff"
        ):
            placements_of(model)

        class Outer(ParallelModule):
            def __init__(self, mesh: Mesh) -> None:
                super().__init__(mesh)
                self.scale = Scale(mesh)

            def placements(self) -> dict[str, Placement]:
                return {"scale.weight": Placement((HIDDEN,), init=Zeros())}

        with pytest.raises(PlacementError, match=r"scale.weight: declared twice, as Placement\(.*; declare it once"):
            placements_of(Outer(mesh_at()))


class TestInitialise:
    def test_values_are_those_of_one_rank_on_every_layout_and_stage(self) -> None:
        reference = Model(mesh_at(), layers=range(4))
        initialise_(reference, mesh_at(), seed=3)
        whole = values(reference)
        for tp in (2, 4):
            for stage in (range(2), range(2, 4)):
                ranks = []
                for rank in range(tp):
                    mesh = mesh_at(rank, tp=tp)
                    ranks.append(Model(mesh, layers=stage))
                    initialise_(ranks[-1], mesh, seed=3)
                for name, placement in placements_of(ranks[0]).items():
                    parts = [values(model)[name] for model in ranks]
                    assembled = torch.cat(parts) if placement.shards else parts[0]
                    assert torch.equal(assembled, whole[name]), name

    def test_layers_differ_and_seeds_differ(self) -> None:
        one, other = Model(mesh_at()), Model(mesh_at())
        initialise_(one, mesh_at(), seed=0)
        initialise_(other, mesh_at(), seed=1)
        first = values(one)
        assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
        assert not torch.equal(first["blocks.0.up.weight"], values(other)["blocks.0.up.weight"])

    def test_building_on_meta_and_on_the_device_gives_the_same_even_in_poisoned_memory(
        self, poisoned_memory: None
    ) -> None:
        direct = Model(mesh_at(tp=2))
        initialise_(direct, mesh_at(tp=2), seed=5)
        with torch.device("meta"):
            deferred = Model(mesh_at(tp=2))
        initialise_(deferred, mesh_at(tp=2), seed=5)
        assert values(deferred).keys() == values(direct).keys()
        for name, expected in values(direct).items():
            assert expected.isfinite().all() and torch.equal(values(deferred)[name], expected), name

    def test_ties_and_frozen_parameters_survive(self) -> None:
        with torch.device("meta"):
            model = Model(mesh_at(), tied=True)
            other = Model(mesh_at())
        other.head.weight = other.embedding.weight
        other.blocks["0"]["up"].bias.requires_grad_(False)
        initialise_(model, mesh_at(), seed=0)
        initialise_(other, mesh_at(), seed=0, dtype=torch.bfloat16)
        assert model.head.weight is model.embedding.weight
        assert other.head.weight is other.embedding.weight and not other.head.weight.is_meta
        assert not other.blocks["0"]["up"].bias.requires_grad and other.blocks["1"]["up"].bias.requires_grad
        assert other.head.weight.dtype == torch.bfloat16

    def test_dtypes_start_from_the_same_values(self) -> None:
        models = {dtype: Model(mesh_at()) for dtype in (torch.float32, torch.float64)}
        for dtype, model in models.items():
            initialise_(model, mesh_at(), seed=0, dtype=dtype)
        for name, single in values(models[torch.float32]).items():
            double = values(models[torch.float64])[name]
            assert double.dtype == torch.float64 and torch.equal(double, single.double())

    def test_parameters_already_in_place_keep_their_identity(self) -> None:
        model = Model(mesh_at())
        before = dict(model.named_parameters())
        initialise_(model, mesh_at(), seed=0, dtype=torch.float32, device="cpu")
        assert all(parameter is before[name] for name, parameter in model.named_parameters())

    def test_a_buffer_without_values_is_an_error_by_name(self) -> None:
        with torch.device("meta"):
            model = Model(mesh_at())
            model.foreign.register_buffer("table", torch.zeros(3), persistent=False)
        with pytest.raises(PlacementError, match=r"foreign.table: a buffer built on the meta device has no values"):
            initialise_(model, mesh_at(), seed=0)

    def test_an_undeclared_parameter_is_an_error_by_name(self) -> None:
        model = Model(mesh_at())
        model.bare = nn.Linear(2, 2, bias=False)
        with pytest.raises(PlacementError, match=r"bare.weight: has no placement"):
            initialise_(model, mesh_at(), seed=0)

    def test_a_mesh_that_the_model_was_not_built_for_is_an_error(self) -> None:
        with pytest.raises(PlacementError, match=r"on tp2 it is"):
            initialise_(Model(mesh_at()), mesh_at(tp=2), seed=0)
