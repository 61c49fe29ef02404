"""Where torchrl takes a TensorDict it takes a `RedisTensorDict`; the same done to one in memory is the oracle.

Runs in an environment of its own (``make rl``): torchrl wants an older tensordict.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_tds import LAYOUTS, assert_same, remote
from rows_in_memory import assert_same_tensor
from servers import ServerProcess
from tensordict import TensorDict, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import (
    Binary,
    Bounded,
    Composite,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    Unbounded,
)
from torchrl.data.postprocs import MultiStep
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement, SliceSampler
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import (
    CatTensors,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    ObservationNorm,
    RenameTransform,
    Reward2GoTransform,
    RewardScaling,
    SelectTransform,
    SignTransform,
    UnsqueezeTransform,
)
from torchrl.envs.utils import step_mdp
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss
from torchrl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator

from td_datapipes import RedisTensorDict
from td_datapipes.errors import RemoteOperationError

ROWS, TRAJECTORY = 40, 10
Act = Callable[[Any], Any]


def steps(*batch: int) -> TensorDict:
    """What a collector gives: steps of trajectories of ten along the last dim of the batch, continuous actions."""
    generator = torch.Generator().manual_seed(7)
    shape = batch or (ROWS,)
    position = torch.arange(torch.Size(shape).numel()).reshape(shape)
    done = (position % TRAJECTORY == TRAJECTORY - 1)[..., None]

    def random(width: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=generator)

    following = {"observation": random(3), "reward": random(1), "done": done, "terminated": done.clone()}
    return TensorDict(
        {
            "observation": random(3),
            "action": random(2).tanh(),
            "action_log_prob": random(1).squeeze(-1),
            "done": torch.zeros_like(done),
            "terminated": torch.zeros_like(done),
            "collector": {"traj_ids": position // TRAJECTORY},
            "next": following,
        },
        shape,
    )


def same(got: Any, expected: Any) -> None:
    """Tensors, TensorDicts, and sequences and dictionaries of them."""
    if is_tensor_collection(expected):
        assert_same(got, expected)
    elif isinstance(expected, torch.Tensor):
        assert_same_tensor(got, expected)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            same(mine, theirs)
    elif isinstance(expected, dict):
        assert set(got) == set(expected)
        for name, theirs in expected.items():
            same(got[name], theirs)
    else:
        assert got == expected


def both(act: Act, server: ServerProcess, layout: str, data: TensorDict) -> None:
    """Do it to what is on the server and to what is in memory, with the same random numbers.

    What it gives is the same, and so is what the data are afterwards: on the server, looked at by another handle.
    """
    there, reference = remote(data, server, layout), data.clone()
    found = []
    for td in (there, reference):
        torch.manual_seed(1)
        found.append(act(td))
    same(_local(found[0]), found[1])
    again = RedisTensorDict.from_redis(server.url("td"))
    assert_same(again.to_local(), reference)
    again.close()
    there.close()


def _local(value: Any) -> Any:
    if isinstance(value, RedisTensorDict):
        return value.to_local()
    return [_local(item) for item in value] if isinstance(value, list | tuple) else value


# Replay buffers.


def extended(storage: Callable[[], Any], kind: type[ReplayBuffer] = TensorDictReplayBuffer, **options: Any) -> Act:
    """Extend a buffer, then again with rows, add one, and sample."""

    def act(td: Any) -> Any:
        buffer = kind(storage=storage(), batch_size=8, **options)
        first = buffer.extend(td)
        second = buffer.extend(td[5:9])
        third = buffer.add(td[3])
        return [torch.as_tensor(first), torch.as_tensor(second), torch.as_tensor(third), buffer[:], buffer.sample()]

    return act


def with_info(td: Any) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=8)
    buffer.extend(td)
    batch, info = buffer.sample(return_info=True)
    return [batch, torch.as_tensor(info["index"])]


def slices(td: Any) -> Any:
    sampler = SliceSampler(slice_len=5, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=10)
    buffer.extend(td)
    return buffer.sample()


def as_storage(td: Any) -> Any:
    """The data themselves as the storage's."""
    buffer = ReplayBuffer(storage=TensorStorage(td), sampler=RandomSampler(), batch_size=8)
    before = buffer.sample()
    buffer.extend(td[4:6].clone())
    return [before, len(buffer), buffer.sample(), buffer[3:5], buffer[7]]


def as_immutable(td: Any) -> Any:
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(td), sampler=sampler, writer=ImmutableDatasetWriter(), batch_size=16
    )
    return list(buffer)


def transformed(td: Any) -> Any:
    transform = Compose(
        RewardScaling(0.0, 0.1, in_keys=[("next", "reward")]),
        CatTensors(["observation", "action"], "both", del_keys=False),
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, transform=transform)
    buffer.extend(td)
    return buffer.sample()


def rewards_to_go(td: Any) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    buffer.append_transform(Reward2GoTransform(gamma=0.9))
    buffer.extend(td)
    return buffer[:]


def prefetched(td: Any) -> Any:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=8, prefetch=2)
    buffer.extend(td)
    return [batch for batch, _ in zip(buffer, range(3), strict=False)]


def listed(td: Any) -> Any:
    """Rows in a list: each item is one row's TensorDict."""
    buffer = ReplayBuffer(storage=ListStorage(100), batch_size=4, collate_fn=lambda items: torch.stack(list(items)))
    buffer.extend(td)
    return [buffer[3], buffer.sample()]


BUFFERS: dict[str, Act] = {
    "LazyTensorStorage": extended(lambda: LazyTensorStorage(100)),
    "ReplayBuffer": extended(lambda: LazyTensorStorage(100), ReplayBuffer),
    "around the end": extended(lambda: LazyTensorStorage(43)),
    "ListStorage": listed,
    "info": with_info,
    "slices": slices,
    "storage": as_storage,
    "immutable": as_immutable,
    "transforms": transformed,
    "rewards to go": rewards_to_go,
    "prefetch": prefetched,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", BUFFERS.values(), ids=BUFFERS)
def test_replay_buffers_take_it(server: ServerProcess, layout: str, act: Act) -> None:
    both(act, server, layout, steps())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_memmap_storage_takes_it(redis_server: ServerProcess, layout: str, tmp_path: Path) -> None:
    numbers = iter(range(2))
    act = extended(lambda: LazyMemmapStorage(100, scratch_dir=str(tmp_path / str(next(numbers)))))
    both(act, redis_server, layout, steps())


# Modules and losses.


def network(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


def actor() -> ProbabilisticActor:
    body = torch.nn.Sequential(network(3, 4), NormalParamExtractor())
    module = TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"])
    spec = Bounded(low=-1.0, high=1.0, shape=(2,))
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        out_keys=["action"],
        spec=spec,
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )


def critic() -> ValueOperator:
    return ValueOperator(network(3, 1), in_keys=["observation"])


def module(td: Any) -> Any:
    with torch.no_grad():
        return TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["hidden"])(td)


def sequence(td: Any) -> Any:
    first = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=[("deep", "hidden")])
    second = TensorDictModule(torch.nn.Tanh(), in_keys=[("deep", "hidden")], out_keys=["out"])
    with torch.no_grad():
        return TensorDictSequential(first, second)(td)


def module_with_out(td: Any) -> Any:
    """Rows read, results kept apart."""
    out = TensorDict(batch_size=[6])
    with torch.no_grad():
        TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["hidden"])(
            td[10:16], tensordict_out=out
        )
    return out


def sampled_actions(td: Any) -> Any:
    with torch.no_grad():
        return actor()(td)


def greedy_actions(td: Any) -> Any:
    with torch.no_grad():
        return QValueActor(network(3, 4), in_keys=["observation"], action_space="categorical")(td)


def estimated(make: Callable[[Any], Any]) -> Act:
    def act(td: Any) -> Any:
        with torch.no_grad():
            return make(critic())(td)

    return act


def ppo(td: Any) -> Any:
    loss, value = actor(), critic()
    with torch.no_grad():
        GAE(gamma=0.9, lmbda=0.8, value_network=value)(td)
    return backward(ClipPPOLoss(loss, value), td)


def ppo_on_rows(td: Any) -> Any:
    loss, value = actor(), critic()
    with torch.no_grad():
        GAE(gamma=0.9, lmbda=0.8, value_network=value)(td)
    return backward(ClipPPOLoss(loss, value), td[[3, 1, 17, 30]])


def backward(loss: Any, td: Any) -> Any:
    """Values of a loss, and gradients of what it trains."""
    values = loss(td)
    sum(value for key, value in values.items() if key.startswith("loss")).backward()
    return [values.detach(), [p.grad for p in loss.parameters() if p.grad is not None]]


def dqn(td: Any) -> Any:
    td["choice"] = td["collector", "traj_ids"]
    value = QValueActor(network(3, 4), in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(value, action_space="categorical", delay_value=False)
    loss.set_keys(action="choice")
    loss.make_value_estimator(gamma=0.9)
    return backward(loss, td)


def sac(td: Any) -> Any:
    class Q(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(5, 1)

        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self.inner(torch.cat([observation, action], -1))
            return value

    q_value = ValueOperator(Q(), in_keys=["observation", "action"])
    loss = SACLoss(actor(), q_value, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.9)
    return backward(loss, td[torch.arange(len(td))])


MODULES: dict[str, Act] = {
    "module": module,
    "sequence": sequence,
    "out": module_with_out,
    "sampled actions": sampled_actions,
    "greedy actions": greedy_actions,
    "GAE": estimated(lambda value: GAE(gamma=0.9, lmbda=0.8, value_network=value)),
    "GAE averaged": estimated(lambda value: GAE(gamma=0.9, lmbda=0.8, value_network=value, average_gae=True)),
    "TD(0)": estimated(lambda value: TD0Estimator(gamma=0.9, value_network=value)),
    "TD(1)": estimated(lambda value: TD1Estimator(gamma=0.9, value_network=value)),
    "TD(lambda)": estimated(lambda value: TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=value)),
    "PPO": ppo,
    "PPO on rows": ppo_on_rows,
    "DQN": dqn,
    "SAC": sac,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", MODULES.values(), ids=MODULES)
def test_modules_and_losses_take_it_and_what_they_set_is_on_the_server(
    server: ServerProcess, layout: str, act: Act
) -> None:
    both(act, server, layout, steps())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GAE", "TD(0)", "TD(lambda)", "PPO", "SAC"])
def test_batches_of_two_dims_are_taken_too(redis_server: ServerProcess, layout: str, name: str) -> None:
    both(MODULES[name], redis_server, layout, steps(4, TRAJECTORY))


# Transforms, specs, and what environments give.

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "RewardScaling": lambda: RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]),
    "ObservationNorm": lambda: ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
    "CatTensors": lambda: CatTensors(["observation", "action"], "both", del_keys=False),
    "CatTensors in place of": lambda: CatTensors(["observation", "action"], "both"),
    "DTypeCast": lambda: DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"]),
    "Sign": lambda: SignTransform(in_keys=["observation"]),
    "Unsqueeze": lambda: UnsqueezeTransform(dim=-1, in_keys=["observation"], out_keys=["wide"]),
    "Rename": lambda: RenameTransform(["observation"], ["seen"]),
    "Rename to a copy": lambda: RenameTransform(["observation"], ["seen"], create_copy=True),
    "Exclude": lambda: ExcludeTransform("action"),
    "Select": lambda: SelectTransform("observation"),
    "Reward2Go": lambda: Reward2GoTransform(gamma=0.9),
    "several": lambda: Compose(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]), SignTransform(["action"])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_take_it(server: ServerProcess, layout: str, make: Callable[[], Any]) -> None:
    both(lambda td: make()(td), server, layout, steps())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_returns_over_several_steps(redis_server: ServerProcess, layout: str) -> None:
    data = steps(4, TRAJECTORY)
    data["collector", "mask"] = torch.ones(4, TRAJECTORY, dtype=torch.bool)
    both(lambda td: MultiStep(gamma=0.9, n_steps=3)(td), redis_server, layout, data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_steps_root(server: ServerProcess, layout: str) -> None:
    both(step_mdp, server, layout, steps())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_specs_know_what_belongs_to_them(redis_server: ServerProcess, layout: str) -> None:
    one = Binary(n=1, shape=(ROWS, 1), dtype=torch.bool)
    spec = Composite(
        observation=Unbounded(shape=(ROWS, 3)), action=Bounded(low=-1, high=1, shape=(ROWS, 2)), done=one, shape=(ROWS,)
    )

    def act(td: Any) -> Any:
        inside = spec.is_in(td)
        td["action"] = td["action"] + 2
        return [inside, spec.is_in(td), spec.project(td.select("action", "observation", "done"))]

    both(act, redis_server, layout, steps())


def rollout(**options: Any) -> TensorDict:
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    torch.manual_seed(0)
    env.set_seed(0)
    found: TensorDict = env.rollout(30, **options)
    env.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("breaks", [True, False])
def test_a_rollout_is_stored_and_read_back(server: ServerProcess, layout: str, breaks: bool) -> None:
    found = rollout(break_when_any_done=breaks)
    if layout == "tensordict_store":
        found.names = None  # which this layout does not keep
    there = remote(found, server, layout)
    assert_same(there.to_local(), found)
    assert there.names == found.names
    assert_same(there[3:8], found[3:8])
    assert_same(there[-1]["next"], found[-1]["next"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    buffer.extend(there)
    assert_same(buffer[:].exclude("index"), found)
    there.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_environment_steps_from_it(server: ServerProcess, layout: str) -> None:
    """The batch of an environment has no dims: one row."""
    env = GymEnv("CartPole-v1")
    env.set_seed(3)
    start = env.rand_action(env.reset())
    there = remote(start, server, layout)
    given = env.step(there)
    env.set_seed(3)
    env.reset()
    expected = env.step(start.clone())
    same(_local(given), expected)
    assert_same(RedisTensorDict.from_redis(server.url("td")).to_local(), expected)
    env.close()
    there.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_written_row_by_row(server: ServerProcess, layout: str) -> None:
    """What a hand-written collector does: a batch made beforehand, filled step by step."""
    env = GymEnv("CartPole-v1")
    torch.manual_seed(0)
    env.set_seed(0)
    reference = torch.stack([env.fake_tensordict()] * 6).contiguous()
    there = remote(reference, server, layout)
    state = env.reset()
    for number in range(6):
        done, state = env.step_and_maybe_reset(env.rand_action(state))
        reference[number] = done
        there[number] = done
    assert_same(there.to_local(), reference)
    env.close()
    there.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_server_cannot_do_says_to_local(redis_server: ServerProcess, layout: str) -> None:
    """What would give views, what is only known within a vmap, and what is to be trained on."""
    there = remote(steps(4, TRAJECTORY), redis_server, layout)
    weights = TensorDict({"weight": torch.randn(2, 2, 3), "bias": torch.randn(2, 2)}, [2])
    linear = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["hidden"])

    def ensemble(params: Any) -> Any:
        with TensorDict({"module": params}, []).to_module(linear):
            return linear(there)["hidden"]

    def vmapped() -> Any:
        return torch.vmap(ensemble)(weights)

    def trained() -> Any:
        return TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["hidden"])(there)

    for act in (lambda: there.view(-1), vmapped, trained):
        with pytest.raises(RemoteOperationError, match=r"to_local\(\)"):
            act()
    assert_same(there.to_local(), steps(4, TRAJECTORY))
    there.close()
