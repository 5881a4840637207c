"""Partition schemes: what each one promises about sizes, coverage, duplicates, classes and randomness."""

import dataclasses
import inspect
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flatfed.data.partition import PARTITIONS, Natural, class_counts, summary
from flatfed.data.partition.base import apportion, even_sizes
from flatfed.data.partition.dirichlet import (
    DirichletClass,
    DirichletClient,
    DirichletClientRefill,
    QuantitySkew,
    _cut,
    _top_up,
    fill,
)
from flatfed.data.partition.iid import Iid
from flatfed.data.partition.pathological import PathologicalBalanced, PathologicalIndependent

CONCENTRATIONS = [1e-6, 0.01, 0.1, 1.0, 100.0]

ONCE_AND_ALL = [  # every sample goes to exactly one client
    Iid(),
    Iid(stratified=True),
    *(DirichletClient(concentration=value) for value in CONCENTRATIONS),
    *(DirichletClass(concentration=value, minimum=1) for value in CONCENTRATIONS),
    *(QuantitySkew(concentration=value) for value in CONCENTRATIONS),
]
REFILLING = [
    *(DirichletClientRefill(concentration=value) for value in CONCENTRATIONS),
    PathologicalIndependent(classes_per_client=1),
]
EQUAL_SIZES = [
    scheme
    for scheme in ONCE_AND_ALL + REFILLING
    if isinstance(scheme, Iid | DirichletClient | DirichletClientRefill | PathologicalIndependent)
]


def balanced_labels(classes: int, per_class: int) -> np.ndarray:
    return np.random.default_rng(99).permutation(np.repeat(np.arange(classes), per_class))


@st.composite
def problems(draw):
    """Labels with gaps and rare classes, a number of clients they can serve, and a generator."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = draw(st.integers(1, 300))
    clients = draw(st.integers(1, samples))
    classes = draw(st.integers(1, 12))
    skew = generator.dirichlet(np.full(classes, draw(st.sampled_from([0.2, 1.0, 50.0]))))
    labels = 3 * generator.choice(classes, size=samples, p=skew) - 4
    return labels, clients, generator


# ---- promises that hold for all schemes ---------------------------------------------------------------


@pytest.mark.parametrize("scheme", ONCE_AND_ALL, ids=repr)
@settings(max_examples=15, deadline=None)
@given(problems())
def test_every_sample_goes_to_exactly_one_client(scheme, problem):
    labels, clients, generator = problem
    parts = scheme.split(labels, clients, generator)
    assert len(parts) == clients
    assert all(len(part) >= 1 for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("scheme", EQUAL_SIZES, ids=repr)
@settings(max_examples=15, deadline=None)
@given(problems())
def test_equal_sizes_add_up_to_all_samples(scheme, problem):
    labels, clients, generator = problem
    sizes = [len(part) for part in scheme.split(labels, clients, generator)]
    assert sum(sizes) == len(labels)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("scheme", REFILLING, ids=repr)
@settings(max_examples=15, deadline=None)
@given(problems())
def test_refilled_classes_repeat_a_sample_only_after_all_others(scheme, problem):
    labels, clients, generator = problem
    parts = scheme.split(labels, clients, generator)
    times_used = np.bincount(np.concatenate(parts), minlength=len(labels))
    for label in np.unique(labels):
        assert np.ptp(times_used[labels == label]) <= 1


EXAMPLE_OPTIONS = {
    "concentration": 0.3,
    "classes_per_client": 2,
    "groups": np.random.default_rng(5).integers(30, size=1000),
}


def example(partition):
    """A partition with the defaults and an example of every option that has none."""
    required = [
        name
        for name, option in inspect.signature(partition).parameters.items()
        if option.default is inspect.Parameter.empty
    ]
    for name in required:
        assert name in EXAMPLE_OPTIONS, f"{partition.__name__}: add an example of {name} to EXAMPLE_OPTIONS"
    return partition(**{name: EXAMPLE_OPTIONS[name] for name in required})


def example_schemes():
    return [pytest.param(example(partition), id=name) for name, partition in sorted(PARTITIONS.items())]


@pytest.mark.parametrize("scheme", example_schemes())
def test_result_depends_on_the_generator_alone(scheme):
    labels = balanced_labels(10, 100)
    np.random.seed(1)
    first = scheme.split(labels, 20, np.random.default_rng(7))
    np.random.seed(2)
    second = scheme.split(labels.copy(), 20, np.random.default_rng(7))
    other = scheme.split(labels, 20, np.random.default_rng(8))
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left, right)
    assert any(not np.array_equal(left, right) for left, right in zip(first, other, strict=True))


@pytest.mark.parametrize("scheme", example_schemes())
def test_result_is_sorted_int64_and_leaves_the_labels_alone(scheme):
    labels = balanced_labels(10, 100)
    before = labels.copy()
    for kind in (np.int64, np.int32, np.uint8):
        parts = scheme.split(labels.astype(kind), 20, np.random.default_rng(0))
        assert all(part.dtype == np.int64 and np.all(np.diff(part) >= 0) for part in parts)
    np.testing.assert_array_equal(labels, before)


@pytest.mark.parametrize("scheme", example_schemes())
def test_a_scheme_is_frozen_and_knows_its_options(scheme):
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.minimum = 3
    with pytest.raises(ValidationError, match="concentartion"):
        type(scheme)(concentartion=0.1)


@pytest.mark.parametrize("scheme", example_schemes())
@pytest.mark.parametrize(
    ("labels", "clients", "message"),
    [
        (np.zeros(5, int), 6, r"clients=6 .* 5 samples: ask for at most 5"),
        (np.zeros(5, int), 0, r"clients=0 "),
        (np.zeros(0, int), 1, r"labels has length 0"),
        (np.zeros((5, 2), int), 1, r"labels has shape \(5, 2\)"),
        (np.zeros(5), 1, r"labels has type float64"),
    ],
)
def test_arguments_that_fit_no_scheme_are_named(scheme, labels, clients, message):
    with pytest.raises(ValueError, match=message) as caught:
        scheme.split(labels, clients, np.random.default_rng(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e7, "much"])
@pytest.mark.parametrize("kind", [DirichletClient, DirichletClientRefill, DirichletClass, QuantitySkew])
def test_bad_concentration_names_the_field(kind, value):
    with pytest.raises(ValidationError, match="concentration"):
        kind(concentration=value)


# ---- heterogeneity ------------------------------------------------------------------------------------


def label_distance(parts, labels) -> float:
    """Mean total variation distance between a client's class shares and those of the whole."""
    classes = int(labels.max()) + 1
    counts = class_counts(parts, labels, classes)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - np.bincount(labels) / len(labels)).sum(axis=1).mean() / 2)


def mean_label_distance(scheme, labels, clients, repetitions) -> float:
    return float(
        np.mean(
            [
                label_distance(scheme.split(labels, clients, np.random.default_rng(seed)), labels)
                for seed in range(repetitions)
            ]
        )
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [(DirichletClient, {}), (DirichletClientRefill, {}), (DirichletClass, {"minimum": 1})],
)
def test_labels_grow_more_uneven_as_the_concentration_falls(kind, options):
    # One split of a thousand clients scatters by about 0.01, the mean of five by half of that.
    labels = balanced_labels(10, 3000)
    distances = [
        mean_label_distance(kind(concentration=value, **options), labels, 1000, 5)
        for value in (100.0, 10.0, 1.0, 0.3, 0.1, 0.03, 0.01)
    ]
    assert np.all(np.diff(distances) > 0.02), distances
    assert distances[0] < mean_label_distance(Iid(), labels, 1000, 5) + 0.05
    assert distances[-1] > 0.8


def test_few_clients_without_replacement_are_held_back_by_the_leftovers():
    labels = balanced_labels(10, 400)
    concentrations = (0.1, 0.02, 1e-4)
    filled = [mean_label_distance(DirichletClient(concentration=v), labels, 20, 30) for v in concentrations]
    refilled = [
        mean_label_distance(DirichletClientRefill(concentration=v), labels, 20, 30) for v in concentrations
    ]
    assert filled[0] < filled[1] - 0.03 and filled[2] < filled[1] - 0.03
    assert refilled[0] < refilled[1] < refilled[2]
    assert refilled[2] > filled[2] + 0.2


def test_sizes_grow_more_uneven_as_the_concentration_falls_and_labels_do_not():
    labels = balanced_labels(10, 2000)
    spreads = []
    for value in (100.0, 10.0, 1.0, 0.1, 0.01):
        parts = QuantitySkew(concentration=value, minimum=50).split(labels, 100, np.random.default_rng(3))
        sizes = np.array([len(part) for part in parts])
        assert sizes.min() >= 50
        spreads.append(sizes.std())
        # Multinomial noise around equal shares: the statistic has mean 9 * 100 and spread sqrt(2 * 900).
        counts = class_counts(parts, labels, 10)
        expected = sizes[:, None] / 10
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < 900 + 5 * np.sqrt(1800)
    assert np.all(np.diff(spreads) > 0), spreads


def test_more_classes_per_client_is_more_even():
    labels = balanced_labels(10, 600)
    for kind in (PathologicalBalanced, PathologicalIndependent):
        distances = [
            label_distance(kind(classes_per_client=held).split(labels, 60, np.random.default_rng(0)), labels)
            for held in range(1, 11)
        ]
        # Equal shares of `held` out of ten classes lie exactly this far from the whole.
        np.testing.assert_allclose(distances, 1 - np.arange(1, 11) / 10, atol=0.01)


# ---- dirichlet_client ---------------------------------------------------------------------------------


def naive_fill(priors, owners, room, generator):
    """The slot by slot loop with rejection, as one would write it without numpy."""
    room = list(room)
    chosen = []
    for owner in owners:
        while True:
            drawn = generator.choice(len(room), p=priors[owner])
            if room[drawn] > 0:
                break
        room[drawn] -= 1
        chosen.append(drawn)
    return np.array(chosen)


def fill_frequencies(function, seed, repetitions=800):
    """How often each slot of a small tight problem gets each class, [slots, classes]."""
    priors = np.array([[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.15, 0.05, 0.8]])
    owners = np.array([0, 1, 1, 2, 0, 2, 1, 0, 2])
    room = np.array([2, 4, 3])
    generator = np.random.default_rng(seed)
    total = np.zeros((len(owners), len(room)))
    for _ in range(repetitions):
        chosen = function(priors, owners, room, generator)
        np.testing.assert_array_equal(np.bincount(chosen, minlength=3), room)
        total[np.arange(len(owners)), chosen] += 1
    return total / repetitions


def test_fill_has_the_distribution_of_the_slot_by_slot_loop(monkeypatch):
    naive = fill_frequencies(naive_fill, 2)
    for block in (1, 4, 1 << 16):
        monkeypatch.setattr("flatfed.data.partition.dirichlet.SLOTS_AT_ONCE", block)
        # A difference of two frequencies has a spread of at most sqrt(0.5 / repetitions) = 0.025.
        assert np.abs(fill_frequencies(fill, 1) - naive).max() < 4.5 * np.sqrt(0.5 / 800)


def test_clients_may_be_of_log_normal_sizes():
    labels = np.repeat(np.arange(10), 1000)
    split = PARTITIONS["dirichlet_client"](concentration=0.3, size_spread=0.5).split
    rows = split(labels, 200, np.random.default_rng(0))
    sizes = np.array([len(own) for own in rows])
    assert sizes.sum() == len(np.unique(np.concatenate(rows))) == 10_000 and sizes.min() >= 1
    # Of 200 clients the deviation is known to a twentieth; a sample each is set aside.
    assert np.log(sizes - 1).std() == pytest.approx(0.5, rel=0.15)
    equal = PARTITIONS["dirichlet_client"](concentration=0.3, size_spread=0.0)
    assert {len(own) for own in equal.split(labels, 200, np.random.default_rng(0))} == {50}


def test_clients_without_a_wish_left_draw_in_proportion_to_the_samples_left():
    priors = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1e-200]])
    owners = np.repeat([0, 1], [200, 1])
    room = np.array([100, 10, 70, 21])
    generator = np.random.default_rng(0)
    after = np.zeros(4)
    for _ in range(400):
        chosen = fill(priors, owners, room, generator)
        np.testing.assert_array_equal(chosen[:100], 0)
        np.testing.assert_array_equal(np.bincount(chosen, minlength=4), room)
        after[chosen[100]] += 1
    expected = 400 * np.array([10, 70, 21]) / 101
    assert after[0] == 0
    assert ((after[1:] - expected) ** 2 / expected).sum() < 13.8  # 0.1 % point, two degrees of freedom


def test_clients_filled_without_replacement_follow_their_priors_while_there_is_room():
    # With a thousand clients the classes run out only at the very end, so shares must be as spread out
    # as Dirichlet shares sampled `size` times: Var = (1 - 1/C) / C * (b + (1 - b) / size), b = 1 / (C a + 1).
    labels = balanced_labels(5, 20_000)
    concentration, size = 0.5, 100
    parts = DirichletClient(concentration=concentration).split(labels, 1000, np.random.default_rng(0))
    shares = class_counts(parts, labels, 5) / size
    between = 1 / (5 * concentration + 1)
    assert shares.var(axis=0).mean() == pytest.approx(0.16 * (between + (1 - between) / size), rel=0.08)


@pytest.mark.parametrize("concentration", [1e-300, 1e-12, 1e-3, 0.01])
@pytest.mark.parametrize("clients", [2, 10, 11, 500])
def test_tiny_concentration_ends(concentration, clients):
    labels = np.random.default_rng(0).choice(10, size=5000, p=np.arange(1, 11) / 55)
    started = time.perf_counter()
    for kind in (DirichletClient, DirichletClientRefill, DirichletClass, QuantitySkew):
        parts = kind(concentration=concentration).split(labels, clients, np.random.default_rng(0))
        assert sum(len(part) for part in parts) == 5000
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("kind", [DirichletClient, DirichletClientRefill, DirichletClass])
def test_a_large_federation_is_split_in_seconds(kind, classes):
    labels = np.random.default_rng(0).integers(classes, size=200_000)
    started = time.perf_counter()
    kind(concentration=0.01).split(labels, 10_000, np.random.default_rng(0))
    assert time.perf_counter() - started < 5


# ---- dirichlet_client_refill --------------------------------------------------------------------------


@pytest.mark.parametrize("concentration", [0.05, 0.5, 5.0])
def test_refilled_clients_have_the_moments_of_dirichlet_shares(concentration):
    classes, clients, size = 5, 4000, 20
    labels = np.repeat(np.arange(classes), [1000, 40_000, 9000, 20_000, 10_000])  # sizes must not matter
    scheme = DirichletClientRefill(concentration=concentration)
    shares = class_counts(scheme.split(labels, clients, np.random.default_rng(1)), labels, classes) / size
    between = 1 / (classes * concentration + 1)
    variance = 0.16 * (between + (1 - between) / size)
    np.testing.assert_allclose(shares.mean(axis=0), 0.2, atol=4.5 * np.sqrt(variance / clients))
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.1)


def test_refilling_repeats_some_samples_and_leaves_others_out():
    # Five clients of one class each: at most half of the ten classes can be covered.
    labels = balanced_labels(10, 100)
    parts = DirichletClientRefill(concentration=1e-6).split(labels, 5, np.random.default_rng(0))
    outcome = summary(parts, labels)
    assert outcome.most_classes == 1
    assert len(outcome.uncovered_classes) >= 5
    assert outcome.samples_duplicated == outcome.samples_unused >= 500


# ---- dirichlet_class ----------------------------------------------------------------------------------


def test_class_shares_have_the_moments_of_a_dirichlet_cut():
    clients, concentration = 8, 0.4
    generator = np.random.default_rng(0)
    first = np.array(
        [_cut(np.array([1000, 1]), clients, concentration, True, generator)[:, 0] for _ in range(3000)]
    )
    shares = first / 1000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    np.testing.assert_allclose(shares.mean(axis=0), 1 / clients, atol=4.5 * np.sqrt(variance / 3000))
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.12)


def test_a_client_with_its_fair_share_gets_nothing_more():
    generator = np.random.default_rng(0)
    counts = np.array([300, 200, 400, 100])
    for _ in range(200):
        holdings = _cut(counts, 5, 0.3, True, generator)
        np.testing.assert_array_equal(holdings.sum(axis=0), counts)
        before = np.cumsum(holdings, axis=1) - holdings
        assert np.all(holdings[before >= 200] == 0)


def test_without_a_cap_clients_hold_as_many_classes_as_they_draw():
    labels, sizes, classes = balanced_labels(10, 500), {}, {}
    for cap in (True, False):
        scheme = DirichletClass(concentration=0.01, cap=cap)
        outcomes = [scheme.split(labels, 10, np.random.default_rng(seed)) for seed in range(20)]
        sizes[cap] = np.mean([max(map(len, parts)) for parts in outcomes])
        classes[cap] = np.mean([max(len(np.unique(labels[part])) for part in parts) for parts in outcomes])
        for parts in outcomes:
            np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(5000))
    # Ten classes that fall on ten clients one by one: the fullest has between two and three.
    assert sizes[True] < 1000 < sizes[False]
    assert classes[False] > classes[True]


@pytest.mark.parametrize("redraws", [0, 100])
@pytest.mark.parametrize(("clients", "minimum"), [(10, 10), (100, 10), (100, 20), (7, 285)])
def test_every_client_reaches_the_minimum(clients, minimum, redraws):
    labels = balanced_labels(10, 200)
    for concentration in (0.01, 0.5):
        scheme = DirichletClass(concentration=concentration, minimum=minimum, redraws=redraws)
        parts = scheme.split(labels, clients, np.random.default_rng(4))
        assert min(len(part) for part in parts) >= minimum
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(2000))


def test_redrawing_makes_topping_up_unnecessary_where_it_can():
    # One draw leaves somebody short about two times in three here; a hundred draws practically never do.
    labels = balanced_labels(10, 500)
    scheme = DirichletClass(concentration=0.2, minimum=10)
    topped_up = DirichletClass(concentration=0.2, minimum=10, redraws=0)
    exactly_minimum = [0, 0]
    for seed in range(40):
        for which, variant in enumerate((scheme, topped_up)):
            parts = variant.split(labels, 60, np.random.default_rng(seed))
            exactly_minimum[which] += sum(len(part) == 10 for part in parts)
    assert exactly_minimum[0] < exactly_minimum[1] / 2


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(1, 20))
def test_top_up_gives_exactly_what_is_missing(sizes, minimum):
    sizes = np.array(sizes)
    minimum = min(minimum, int(sizes.mean()))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    after = np.bincount(_top_up(owners, len(sizes), minimum), minlength=len(sizes))
    assert after.sum() == sizes.sum()
    np.testing.assert_array_equal(after[sizes < minimum], minimum)
    assert np.all(after[sizes >= minimum] >= minimum)
    assert np.all(after[sizes >= minimum] <= sizes[sizes >= minimum])


def test_a_minimum_beyond_the_samples_is_an_error():
    labels = balanced_labels(10, 10)
    for kind in (DirichletClass, QuantitySkew):
        with pytest.raises(
            ValueError, match=r"minimum=11 needs 110 samples .* there are 100: lower minimum to 10"
        ):
            kind(concentration=1.0, minimum=11).split(labels, 10, np.random.default_rng(0))
        with pytest.raises(ValidationError, match="minimum"):
            kind(concentration=1.0, minimum=0)


# ---- iid ----------------------------------------------------------------------------------------------


def test_stratified_clients_hold_equal_numbers_of_every_class():
    labels = np.random.default_rng(0).integers(7, size=1003)
    counts = class_counts(Iid(stratified=True).split(labels, 12, np.random.default_rng(0)), labels, 7)
    assert np.all(np.ptp(counts, axis=0) <= 1)
    plain = class_counts(Iid().split(labels, 12, np.random.default_rng(0)), labels, 7)
    assert np.ptp(plain, axis=0).max() > 3


# ---- pathological -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.data())
def test_balanced_clients_hold_exactly_the_asked_number_of_classes(classes, clients, data):
    held = data.draw(st.integers(1, classes))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    per_class = 7 * -(-clients * held // classes)
    labels = balanced_labels(classes, per_class)
    parts = PathologicalBalanced(classes_per_client=held).split(labels, clients, generator)
    counts = class_counts(parts, labels, classes)
    np.testing.assert_array_equal((counts > 0).sum(axis=1), held)
    holders = (counts > 0).sum(axis=0)
    assert np.ptp(holders) <= 1
    # All samples of a class that anybody holds are handed out, once.
    np.testing.assert_array_equal(counts.sum(axis=0), np.where(holders > 0, per_class, 0))
    assert summary(parts, labels).samples_duplicated == 0
    if clients * held % classes == 0:
        np.testing.assert_array_equal([len(part) for part in parts], 7 * held)


def test_balanced_single_class_clients_take_turns():
    labels = np.random.default_rng(0).integers(10, size=3000)
    parts = PathologicalBalanced(classes_per_client=1).split(labels, 50, np.random.default_rng(0))
    for client, part in enumerate(parts):
        assert set(labels[part]) == {client % 10}


def test_odd_samples_do_not_pile_up_on_some_clients():
    labels = balanced_labels(10, 55)
    parts = PathologicalBalanced(classes_per_client=10).split(labels, 50, np.random.default_rng(0))
    np.testing.assert_array_equal([len(part) for part in parts], 11)


def test_balanced_clients_mix_all_pairs_of_classes():
    labels = balanced_labels(6, 1000)
    parts = PathologicalBalanced(classes_per_client=2).split(labels, 600, np.random.default_rng(0))
    pairs = {tuple(np.unique(labels[part])) for part in parts}
    assert len(pairs) == 15


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.data())
def test_independent_clients_hold_exactly_the_asked_number_of_classes(classes, clients, data):
    held = data.draw(st.integers(1, classes))
    labels = balanced_labels(classes, -(-clients * held // classes) + data.draw(st.integers(0, 9)))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    parts = PathologicalIndependent(classes_per_client=held).split(labels, clients, generator)
    counts = class_counts(parts, labels, classes)
    np.testing.assert_array_equal((counts > 0).sum(axis=1), held)
    for row in counts:
        assert np.ptp(row[row > 0]) <= 1


def test_independent_clients_choose_classes_uniformly_and_unevenly():
    labels = balanced_labels(10, 4000)
    parts = PathologicalIndependent(classes_per_client=3).split(labels, 4000, np.random.default_rng(0))
    holders = (class_counts(parts, labels, 10) > 0).sum(axis=0)
    spread = np.sqrt(4000 * 0.3 * 0.7)
    assert np.abs(holders - 1200).max() < 4.5 * spread
    assert holders.std() > spread / 3  # the balanced variant would have none
    assert summary(parts, labels).samples_duplicated > 0


@pytest.mark.parametrize("kind", [PathologicalBalanced, PathologicalIndependent])
def test_more_classes_than_there_are_is_an_error(kind):
    with pytest.raises(ValueError, match=r"classes_per_client=4 is more than the 3 classes .* use at most 3"):
        kind(classes_per_client=4).split(balanced_labels(3, 50), 5, np.random.default_rng(0))
    with pytest.raises(ValidationError, match="classes_per_client"):
        kind(classes_per_client=0)


def test_shards_without_samples_are_an_error():
    labels = np.repeat([0, 1, 7], [100, 100, 2])
    with pytest.raises(ValueError, match=r"classes_per_client=1 .* 4 clients share the 2 samples of class 7"):
        PathologicalBalanced(classes_per_client=1).split(labels, 12, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"classes_per_client=3 is more than the 2 samples of a client"):
        PathologicalIndependent(classes_per_client=3).split(labels, 100, np.random.default_rng(0))


# ---- natural ------------------------------------------------------------------------------------------


def test_natural_clients_are_the_groups_in_order():
    groups = np.array(["mia", "ann", "mia", "bob", "ann", "ann"])
    parts = Natural(groups=groups).split(np.zeros(6, int), 3, np.random.default_rng(0))
    assert [part.tolist() for part in parts] == [[1, 4, 5], [3], [0, 2]]


def test_natural_leaves_small_groups_out_and_chooses_among_the_rest():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), np.arange(1, 11))
    chosen = set()
    for _ in range(60):
        parts = Natural(groups=groups, minimum=4).split(np.zeros(55, int), 3, generator)
        ids = [int(groups[part[0]]) for part in parts]
        for identity, part in zip(ids, parts, strict=True):
            np.testing.assert_array_equal(part, np.flatnonzero(groups == identity))
        chosen |= set(ids)
    assert chosen == set(range(3, 10))
    with pytest.raises(ValueError, match=r"clients=8 is more than the 7 groups with at least minimum=4"):
        Natural(groups=groups, minimum=4).split(np.zeros(55, int), 8, generator)


def test_natural_groups_are_copied_and_checked():
    groups = np.array([0, 0, 1])
    scheme = Natural(groups=groups)
    groups[0] = 1
    assert scheme.groups.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="groups has length 3 for 4 labels"):
        scheme.split(np.zeros(4, int), 2, np.random.default_rng(0))
    for wrong in (np.zeros((2, 2), int), np.zeros(3), 5):
        with pytest.raises(ValidationError, match="groups"):
            Natural(groups=wrong)


# ---- bookkeeping --------------------------------------------------------------------------------------


def test_summary_of_a_partition_counted_by_hand():
    labels = np.array([5, 5, 5, 2, 2, 9, 9, 0])
    parts = [np.array([0, 1, 3]), np.array([1, 1, 4, 5]), np.array([2]), np.array([], np.int64)]
    outcome = summary(parts, labels)
    assert dataclasses.asdict(outcome) == {
        "clients": 4,
        "empty_clients": 1,
        "samples_used": 6,
        "samples_unused": 2,
        "samples_duplicated": 2,
        "smallest_client": 0,
        "median_client": 2.0,
        "largest_client": 4,
        "fewest_classes": 0,
        "mean_classes": 1.5,
        "most_classes": 3,
        "classes": 4,
        "uncovered_classes": (0,),
    }


def test_class_counts_by_hand_and_for_labels_out_of_range():
    labels = np.array([0, 2, 2, 1])
    np.testing.assert_array_equal(
        class_counts([np.array([0, 1, 2]), np.array([3, 3])], labels, 4), [[1, 0, 2, 0], [0, 2, 0, 0]]
    )
    with pytest.raises(ValueError, match=r"classes=2: .*classes=3"):
        class_counts([np.arange(4)], labels, 2)
    with pytest.raises(ValueError, match="labels run from -1"):
        class_counts([np.arange(4)], labels - 1, 3)
    with pytest.raises(ValueError, match="parts has length 0"):
        class_counts([], labels, 3)


@given(st.integers(0, 500), st.integers(1, 40))
def test_even_sizes_add_up(samples, clients):
    sizes = even_sizes(samples, clients)
    assert len(sizes) == clients and sizes.sum() == samples and np.ptp(sizes) <= 1


@given(st.integers(0, 500), st.integers(1, 40), st.integers(0, 1000))
def test_apportioned_sizes_add_up_and_stay_close(total, clients, seed):
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(clients, 0.3))
    sizes = apportion(shares, total, generator)
    assert sizes.sum() == total and sizes.min() >= 0
    assert np.abs(sizes - shares * total).max() < 1 + 1e-9


def test_apportioning_favours_nobody():
    generator = np.random.default_rng(0)
    shares = np.array([0.25, 0.05, 0.0, 0.68, 0.02])
    mean = np.mean([apportion(shares, 10, generator) for _ in range(4000)], axis=0)
    np.testing.assert_allclose(mean, 10 * shares, atol=4.5 * 0.5 / np.sqrt(4000))
