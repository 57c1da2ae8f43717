"""The environment of a trial's processes, as whole values."""

from engine.settings import ModelShape, TrialSettings
from harness.launch.environment import rank_environment, render
from harness.provenance import redact

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=32)
TWO_RANKS = TrialSettings(task="train", method="burst", model=MODEL, seq_len=64, cp_size=2)


def test_cpu_ranks_share_the_cores_and_wait_asleep():
    assert render(TWO_RANKS, device="cpu", cores=8, host_ranks=2, user={"HOME": "/home/me"}) == {
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_gpu_ranks_get_a_growing_allocator_and_errors_instead_of_hangs():
    assert render(TWO_RANKS, device="cuda", cores=64, host_ranks=2, user={}) == {
        "OMP_NUM_THREADS": "8",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_the_users_own_choices_win_and_are_kept():
    user = {"OMP_NUM_THREADS": "3", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert user.items() <= render(TWO_RANKS, device="cuda", cores=64, host_ranks=2, user=user).items()


def test_ranks_spread_over_hosts_leave_the_interface_to_the_host():
    assert "GLOO_SOCKET_IFNAME" not in render(TWO_RANKS, device="cpu", cores=8, host_ranks=1, user={})


def test_a_rank_gets_what_torchrun_would_set():
    assert rank_environment(1, ranks=4, port=29500) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_consecutive_ranks_form_the_emulated_nodes():
    hosts = [rank_environment(rank, ranks=6, port=1, emulate_nodes=3)["NCCL_HOSTID"] for rank in range(6)]
    assert hosts == [f"burst-node-{node}" for node in (0, 0, 1, 1, 2, 2)]


def test_secrets_are_redacted_by_their_names():
    secrets = {"HF_TOKEN": "a", "aws_secret": "b", "DB_PASSWORD": "c", "API_KEY": "d", "MY_CREDENTIALS": "e"}
    assert redact(secrets | {"NCCL_DEBUG": "INFO"}) == {
        **dict.fromkeys(sorted(secrets), "<redacted>"),
        "NCCL_DEBUG": "INFO",
    }
