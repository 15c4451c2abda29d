"""What a run must know of a graph: what is equal, what is kept and until when, how deep it is."""

from __future__ import annotations

import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.graph import Graph, producer
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import (
    AddScalar,
    Average,
    Call,
    Cast,
    Concat,
    Distinct,
    IndexSelect,
    Permute,
    Same,
    Select,
    Slice,
)
from tests.helpers.checks import spec
from tests.helpers.functions import backwards, halves
from tests.helpers.running import CountingSource, run_whole
from tests.helpers.tensors import same_bytes

X = torch.arange(16.0).reshape(4, 4)


def chain(x: Lazy, *ops: object) -> Lazy:
    for op in ops:
        x = apply(op, x)  # type: ignore[arg-type]
    return x


def test_equal_operations_on_identical_inputs_are_one_node() -> None:
    source = CountingSource({"x": X})
    ops = (Permute((1, 0)), Slice(0, 1, 2), Cast(torch.float16), Select(0, 1))
    a, b = (chain(source.lazy("x"), *ops) for _ in range(2))
    assert a is not b
    graph = Graph([a, b, source.lazy("x")])
    assert graph.roots[0] is graph.roots[1] is not graph.roots[2]


def test_what_differs_stays_apart() -> None:
    x = CountingSource({"x": X}).lazy("x")
    nodes = [
        apply(op, x)
        for op in (
            Slice(0, 0, 2),
            Slice(1, 0, 2),
            Slice(0, 0, 2, 2),
            Select(0, 1),
            AddScalar(1.0),
            AddScalar(2.0),
            Distinct("a"),
            Distinct("b"),
            Cast(torch.float16),
            Cast(torch.bfloat16),
            Permute((0, 1)),
            Call(backwards, (spec(4, 4),)),
            Call(torch.neg, (spec(4, 4),)),
        )
    ]
    nodes += [apply(Concat(0), nodes[0], nodes[2]), apply(Concat(0), nodes[2], nodes[0]), defer_leaf(X)]
    assert len({id(root) for root in Graph(nodes).roots}) == len(nodes)


def test_interning_leaves_the_given_nodes_alone() -> None:
    a, b = (apply(AddScalar(1.0), defer_leaf(X)) for _ in range(2))
    joined = apply(Concat(0), a, b)
    before = (joined.inputs, a.inputs, b.inputs)
    Graph([joined, a, b])
    assert (joined.inputs, a.inputs, b.inputs) == before


def test_a_multiply_used_computing_node_is_computed_once() -> None:
    x = CountingSource({"x": X}).lazy("x")
    added = apply(AddScalar(1.0), x)
    both = apply(Concat(0), apply(Permute((1, 0)), added), apply(Slice(0, 0, 4), added))
    ran = run_whole(both)
    assert ran.watcher.counts["AddScalar"] == 1 and ran.watcher.counts["elements"] == 16
    assert same_bytes(ran.results[0], torch.cat([(X + 1).t(), X + 1]))
    assert ran.session.in_use == 0


def test_computed_once_though_used_through_one_structural_node() -> None:
    """The node is used once by a permutation, which is used twice."""
    turned = apply(Permute((1, 0)), apply(AddScalar(1.0), defer_leaf(X)))
    ran = run_whole(apply(Concat(0), turned, turned))
    assert ran.watcher.counts["AddScalar"] == 1
    assert same_bytes(ran.results[0], torch.cat([(X + 1).t()] * 2))


def test_towers_of_shared_nodes_do_not_explode() -> None:
    """Each level uses the one below twice: 2 to the 40 ways down."""
    node = defer_leaf(X)
    for _ in range(40):
        turned = apply(Permute((1, 0)), node)
        node = apply(Average((0.5, 0.5)), turned, turned)
    ran = run_whole(node)
    assert ran.watcher.counts["Average"] == 40
    assert same_bytes(ran.results[0], X)


def test_equal_roots_are_computed_once() -> None:
    x = CountingSource({"x": X}).lazy("x")
    a, b, c = (apply(AddScalar(1.0), x) for _ in range(3))
    ran = run_whole(a, b, apply(Permute((1, 0)), c))
    assert ran.watcher.counts["AddScalar"] == 1
    assert ran.session.in_use == 0


def test_used_once_is_not_kept() -> None:
    node = chain(defer_leaf(X), AddScalar(1.0), Permute((1, 0)), AddScalar(2.0), Cast(torch.float16))
    graph = Graph([node])
    assert graph.kept == {} and graph.last_root == {}


def test_kept_nodes_go_with_their_last_root() -> None:
    x = defer_leaf(X)
    called = apply(Call(backwards, (spec(4, 4),)), x)
    shared = apply(AddScalar(1.0), x)
    roots = [
        apply(Slice(0, 0, 1), called),
        shared,
        apply(Permute((1, 0)), shared),
        apply(Permute((1, 0)), called),
        x,
    ]
    graph = Graph(roots)
    last = {type(graph.kept[key].op).__name__: position for key, position in graph.last_root.items()}
    assert last == {"Call": 3, "AddScalar": 2}


def test_depth_counts_what_may_take_scratch() -> None:
    x = defer_leaf(X)
    node = chain(
        x, Permute((1, 0)), Cast(torch.float64), Slice(0, 0, 2), AddScalar(1.0), IndexSelect(0, (1, 0)), Distinct("a")
    )
    graph = Graph([apply(Concat(1), node, node), x])
    assert graph.depth[id(graph.roots[0])] == 3
    assert graph.depth[id(graph.roots[1])] == 0


def test_producer() -> None:
    first, second = apply(Call(halves, (spec(8), spec(8))), defer_leaf(X))
    assert producer(second) == (second.inputs[0], 1)
    assert producer(first)[0] is producer(second)[0]
    plain = apply(AddScalar(1.0), defer_leaf(X))
    assert producer(plain) == (plain, 0)


def test_a_deep_graph_is_walked_without_recursion() -> None:
    node = defer_leaf(X)
    for i in range(5000):
        node = apply(Permute((1, 0)) if i % 2 else Average((0.5, 0.5)), *([node] if i % 2 else [node, node]))
    graph = Graph([node, node])
    assert len(graph.kept) == 2500


def test_value_checks_are_made_once() -> None:
    a, b = defer_leaf(X), defer_leaf(X.clone())
    checked = apply(Same(("a", "b"), "same"), a, b)
    ran = run_whole(checked, apply(Permute((1, 0)), checked), apply(Same(("a", "b"), "same"), a, b))
    assert ran.watcher.counts["Same"] == 1
