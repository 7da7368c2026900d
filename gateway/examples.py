"""Examples in the description of the public API, by operation; a test validates them."""

from __future__ import annotations

from typing import Any

JOB = "job_01m7x7bdh29b0c6vxjkxnx11mt"

PARAMETERS = {
    "job_id": JOB,
    "array_id": "array_01m7x7bdh29b0c6vxjkxnx1000",
    "session_id": "exec_1_0_8f14e45fceea167a5a36dedd4bea2543",
    "tenant_id": "vision",
    "budget_id": "budget_01m7x7bc3bek0m17yf7jgq3ar1",
    "webhook_id": "webhook_01m7x7bc3bek0m17yf7jgq3ar1",
    "key_id": "key_01m7x7bc3bek0m17yf7jgq3ar1",
    "node_id": "node-1",
    "gpu": "0",
    "name": "green",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "number": "0",
    "round_number": "42",
    "zone": "US-CAL-CISO",
    "solve_id": "solve_01m7x7bc3bek0m17yf7jgq3ar1",
    "pool": "chat",
    "fleet": "edge",
    "app": "photos",
    "endpoint": "virginia-1",
    "plan_id": "plan_01m7x7bc3bek0m17yf7jgq3ar1",
    "simulation_id": "simulation_01m7x7bc3bek0m17yf7jgq3ar1",
}

_TRAIN: dict[str, Any] = {
    "name": "resnet50",
    "command": ["python", "train.py", "--epochs", "90"],
    "gpus": {"min": 1, "max": 8},
    "work": {"total": 90, "unit": "epochs"},
    "progress": {"source": "log", "pattern": "epoch (?P<done>[0-9]+)/(?P<total>[0-9]+)"},
    "flexibility_s": 86400,
    "project": "vision",
    "labels": {"team": "perception"},
}

BODIES: dict[str, Any] = {
    "submit_job": _TRAIN,
    "estimate_job": _TRAIN,
    "run_in_job": {"command": ["nvidia-smi"]},
    "send_to_command": {"offset": 0, "data": "MSsxCg==", "end": True},
    "submit_jobs": {"jobs": [_TRAIN, {"name": "eval", "command": ["python", "eval.py"]}]},
    "create_tenant": {"id": "vision", "limits": {"max_gpus": 64}},
    "change_tenant": {"limits": {"max_gpus": 128}},
    "create_key": {"tenant_id": "vision", "role": "user", "label": "CI"},
    "set_budget": {"tenant_id": "vision", "project": "perception", "quantity": "kwh", "amount": 500, "action": "hold"},
    "create_webhook": {"url": "https://example.org/hooks/wattshift", "events": ["job.ended"], "project": "vision"},
    "change_webhook": {"enabled": True},
    "rotate_webhook": {"overlap_s": 86400},
    "start_upload": {"size_bytes": 48210},
    "send_upload_chunk": {"data": "H4sIAAAAAAAC"},
    "set_secret": {"value": "hf_...", "project": "vision"},
    "rotate_key": {"overlap_s": 3600},
    "change_key": {"expires_at": "2027-03-01T00:00:00Z"},
    "choose_policy": {"name": "green", "parameters": {"mu": 2.0}},
    "solve_pools": {
        "step_s": 1800,
        "locations": [
            {"name": "virginia", "gpus": {"A100": 8}, "intensity": [410]},
            {"name": "ohio", "gpus": {"A100": 16, "H100": 4}, "intensity": [520]},
        ],
        "modes": [{"name": "A100-TP4", "gpus": {"A100": 4}}, {"name": "H100-TP4", "gpus": {"H100": 4}}],
        "partitions": [
            {
                "name": "by-length",
                "classes": [
                    {
                        "name": "short",
                        "demand_qps": [20],
                        "max_ttft_ms": 300,
                        "profiles": [
                            {"mode": "A100-TP4", "max_qps": 11.2, "power_w": 1466, "ttft_ms": 124},
                            {"mode": "H100-TP4", "max_qps": 16.4, "power_w": 1295, "ttft_ms": 76},
                        ],
                    }
                ],
            }
        ],
        "running": [{"location": "virginia", "mode": "A100-TP4", "instances": 1}],
    },
    "solve_partition": {
        "gpus": 4,
        "idle_w": 83.8,
        "intensity_gco2_per_kwh": 300,
        "applications": [
            {
                "name": "photos",
                "requests_per_s": 400,
                "sla_p95_ms": 10,
                "max_accuracy_loss_pct": 3,
                "variants": [
                    {
                        "name": "b3",
                        "accuracy_pct": 81.5,
                        "profiles": [
                            {"slice": "1g", "service_ms": 3.45, "busy_w": 23.1},
                            {"slice": "7g", "service_ms": 2.07, "busy_w": 70.5},
                        ],
                    },
                    {
                        "name": "b7",
                        "accuracy_pct": 84.6,
                        "profiles": [{"slice": "7g", "service_ms": 6.07, "busy_w": 138}],
                    },
                ],
            }
        ],
    },
    "solve_allocation": {
        "nodes": [{"name": "n0", "gpus": 4}, {"name": "n1", "gpus": 4}],
        "idle_w": {"gpu": 60},
        "power_limit_w": 1600,
        "jobs": [
            {
                "name": "bert",
                "work_s": 7200,
                "sizes": [
                    {"gpus": 1, "controls": [{"value": 200, "speed": 0.8, "power_w": 210}]},
                    {
                        "gpus": 4,
                        "controls": [
                            {"value": 200, "speed": 2.9, "power_w": 820},
                            {"value": 300, "speed": 3.4, "power_w": 1180},
                        ],
                    },
                ],
                "layout": {"stages": [{"replicas": 1, "parameter_bytes": 4.4e8, "forward_s": 0.05, "backward_s": 0.1}]},
            },
            {
                "name": "resnet",
                "held": [{"node": "n1", "gpus": 1}],
                "sizes": [
                    {
                        "gpus": 1,
                        "controls": [
                            {"value": 150, "speed": 0.7, "power_w": 160},
                            {"value": 300, "speed": 1, "power_w": 290},
                        ],
                    }
                ],
            },
        ],
    },
    "set_pool": {
        "places": [{"name": "virginia", "zone": "US-MIDA-PJM"}, {"name": "california", "zone": "US-CAL-CISO"}],
        "modes": [
            {
                "name": "A100-TP4",
                "gpu_model": "A100-SXM4-80GB",
                "gpus": 4,
                "command": ["sh", "-c", "exec vllm serve /models/chat --tensor-parallel-size 4 --port $WATTSHIFT_PORT"],
                "start_wh": 60,
            }
        ],
        "partitions": [
            {
                "name": "all",
                "classes": [
                    {
                        "name": "any",
                        "max_ttft_ms": 300,
                        "profiles": [{"mode": "A100-TP4", "max_qps": 11.2, "power_w": 1466, "ttft_ms": 124}],
                    }
                ],
                "assumed_qps": {"any": 8},
            }
        ],
    },
    "change_pool": {"mode": "fixed"},
    "report_pool_traffic": {
        "source": "router-1",
        "windows": [{"start_at": "2026-11-20T19:36:20Z", "requests": [[412, 96], [28, 310]]}],
    },
    "put_fleet": {"gpus": 4, "gpu_model": "A100-SXM4-80GB", "zone": "US-CAL-CISO"},
    "put_app": {
        "fleet": "edge",
        "variants": [
            {
                "name": "b7",
                "accuracy_pct": 84.4,
                "command": ["sh", "-c", "exec serve-model b7 --port $WATTSHIFT_PORT"],
                "profiles": [
                    {"slice": "3g", "service_ms": 61.0, "p95_ms": 64.0, "busy_w": 58.0},
                    {"slice": "7g", "service_ms": 31.5, "p95_ms": 32.8, "busy_w": 142.0},
                ],
            },
            {
                "name": "b1",
                "accuracy_pct": 78.8,
                "command": ["sh", "-c", "exec serve-model b1 --port $WATTSHIFT_PORT"],
                "profiles": [
                    {"slice": "1g", "service_ms": 19.8, "p95_ms": 20.9, "busy_w": 21.0},
                    {"slice": "7g", "service_ms": 9.7, "p95_ms": 10.1, "busy_w": 88.0},
                ],
            },
        ],
        "sla_p95_ms": 120,
        "carbon_weight": 0.5,
        "max_accuracy_loss_pct": 5,
        "requests_per_s": 40,
    },
    "put_endpoint": {
        "url": "https://llm.example.org",
        "models": ["llama-3.1-70b"],
        "location": "virginia",
        "zone": "US-MIDA-PJM",
        "capacity": 128,
        "upstream_secret": "EXAMPLE_ORG_KEY",
    },
    "submit_simulation": {
        "policy": ["las", "green"],
        "jobs": "green-day",
        "carbon": "GB",
        "start": "2023-08-15",
        "days": 1,
        "params": {"green.mu": 1.5},
    },
}

_MADE = {"id": JOB, "name": "resnet50", "state": "queued", "submitted_at": "2026-11-20T19:36:20.770244Z"}

ANSWERS: dict[str, Any] = {
    "exec_events": 'event: output\ndata: {"type":"output","stream":"stdout","data":"Mgo="}\n\n'
    'event: exit\ndata: {"type":"exit","code":0}\n\n',
    "send_to_command": {"offset": 4},
    "submit_job": _MADE,
    "submit_jobs": {"jobs": [_MADE]},
    "get_job_prediction": {
        "job_id": JOB,
        "predicted_at": "2026-11-20T19:36:21.113Z",
        "model_id": "length_01m7zw5j0gfxnxj2gt2qtgv8g8",
        "group_id": "6e0bd5d02b1c20e0",
        "group_seen": True,
        "examples": 14,
        "gpu_s": 8120.0,
        "duration_s": 8120.0,
        "spread_gpu_s": 64.0,
        "low_gpu_s": 7940.0,
        "median_gpu_s": 8102.0,
        "high_gpu_s": 8310.0,
        "actual_gpu_s": 8155.0,
        "error_gpu_s": -35.0,
    },
    "list_pool_instances": {
        "items": [
            {
                "id": "instance_01m805bbdqfxhbcb151cgyg0ac",
                "pool": "chat",
                "state": "ready",
                "place": "virginia",
                "mode": "A100-TP4",
                "partition": "all",
                "request_class": "any",
                "url": "http://10.0.0.17:29500",
                "job_id": JOB,
                "plan_id": "plan_01m7x7bc3bek0m17yf7jgq3ar1",
                "clock": {
                    "policy": "learned",
                    "dry_run": False,
                    "clock_mhz": 810,
                    "wanted_mhz": 810,
                    "exceeded_share": 0.0,
                    "unobserved_share": 0.0,
                    "model_error": 0.031,
                },
                "created_at": "2026-11-20T19:30:02.113Z",
                "ready_at": "2026-11-20T19:31:40.871Z",
            }
        ]
    },
    "list_pool_clocks": {
        "items": [
            {
                "instance": "instance_01m805bbdqfxhbcb151cgyg0ac",
                "job_id": JOB,
                "start_at": "2026-11-20T19:45:00Z",
                "policy": "learned",
                "dry_run": False,
                "decisions": 60,
                "exceeded": 1,
                "unobserved": 0,
                "mean_mhz": 841.5,
                "lowest_mhz": 780.0,
                "highest_mhz": 1410.0,
                "last_mhz": 810.0,
                "model_error": 0.031,
            }
        ]
    },
    "job.ended": {
        "type": "job.ended",
        "timestamp": "2026-11-20T21:51:40Z",
        "data": {
            "job_id": JOB,
            "tenant_id": "vision",
            "name": "resnet50",
            "project": "perception",
            "state": "succeeded",
            "reason": "completed",
            "detail": None,
            "exit_code": 0,
            "submitted_at": "2026-11-20T19:36:20.770244Z",
            "started_at": "2026-11-20T19:36:21.421Z",
            "ended_at": "2026-11-20T21:51:40Z",
            "footprint": {
                "energy_j": 9504000.0,
                "gpu_energy_j": 8208000.0,
                "carbon_gco2": 712.8,
                "gpu_s": 32470.0,
                "estimated_energy_j": 1296000.0,
            },
        },
    },
    "events": (
        "id: 760-4\nevent: job.running\n"
        f'data: {{"id":"760-4","job_id":"{JOB}","at":"2026-11-20T19:36:25Z","type":"job.running","data":{{}}}}\n\n'
    ),
}
