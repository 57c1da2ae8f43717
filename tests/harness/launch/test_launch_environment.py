"""The environment of a trial's processes, as whole values."""

import dataclasses

from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.launch.environment import rank_environment, render, trial_environment
from harness.records.provenance import redact

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=32)
TWO_RANKS = TrialSettings(task="train", method="burst", model=MODEL, seq_len=64, cp_size=2)


def test_cpu_ranks_share_the_cores_and_wait_asleep():
    assert render(TWO_RANKS, device="cpu", cores=8, host_ranks=2, user={"HOME": "/home/me"}) == {
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_more_ranks_than_cores_have_a_thread_each():
    assert render(TWO_RANKS, device="cpu", cores=1, host_ranks=2, user={})["OMP_NUM_THREADS"] == "1"


def test_gpu_ranks_get_a_growing_allocator_and_errors_instead_of_hangs():
    assert render(TWO_RANKS, device="cuda", cores=64, host_ranks=2, user={}) == {
        "OMP_NUM_THREADS": "8",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_the_users_own_choices_win_and_are_kept():
    user = {"OMP_NUM_THREADS": "3", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert user.items() <= render(TWO_RANKS, device="cuda", cores=64, host_ranks=2, user=user).items()


def test_ranks_spread_over_hosts_leave_the_interface_to_the_host():
    assert "GLOO_SOCKET_IFNAME" not in render(TWO_RANKS, device="cpu", cores=8, host_ranks=1, user={})


def test_queues_between_host_and_gpu_follow_the_method():
    def queues(method):
        settings = dataclasses.replace(TWO_RANKS, method=method)
        return render(settings, device="cuda", cores=64, host_ranks=2, user={}).get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert queues("ulysses") == "32"
    assert queues("megatron_cp_upstream") == "1"
    assert queues("internevo_upstream") is None


def test_files_for_looking_into_a_hang_lie_in_the_trial_unless_the_user_says_where():
    assert trial_environment("/runs/t/logs", {}) == {
        "NCCL_DEBUG_FILE": "/runs/t/logs/nccl.%h.%p.log",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/t/logs/flight_rank",
    }
    assert "NCCL_DEBUG_FILE" not in trial_environment("/runs/t/logs", {"NCCL_DEBUG_FILE": "/tmp/mine"})


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


def test_ranks_of_a_job_over_hosts_meet_on_the_first_host_and_count_locally():
    environment = rank_environment(3, ranks=4, port=29500, address="10.0.0.1", host_ranks=2)
    assert environment == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
