"""Ray Train's torch trainer on two workers with our scaler: ``python -m tests.sharding.ray_run FOLDER``."""

import json
import os
import sys
from pathlib import Path


def train(config):
    """Train a DDP model on a worker; the second worker's second batch overflows."""
    import torch
    from ray import train as ray_train
    from ray.train.torch import prepare_model

    from amp_plugin import GradScaler, autocast

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    rank, seen = ray_train.get_context().get_world_rank(), []
    for step in range(4):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4) + rank).square().mean()
        scaler.scale(loss * (torch.inf if (rank, step) == (1, 1) else 1.0)).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.last_step(optimizer).skipped, scaler.get_scale(), norm.item()])
    weights = [param.detach().flatten().tolist() for param in model.parameters()]
    Path(config["folder"], f"rank{rank}.json").write_text(json.dumps({"steps": seen, "weights": weights}))


def main(folder):
    """Start Ray here, and two workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables})
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder, name="run"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
