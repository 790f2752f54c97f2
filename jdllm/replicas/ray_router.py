"""Makes Ray Serve send a call to the replica that it names.

Ray Serve's own routers know queue lengths only. The ingress decides by itself (`routing.py`), so
this router has one rule: a call with `target` goes to the replica of that name while there is one.
It also notes the names of the replicas (`running_names.py`): it lives in the process of the
handle, and is the one place where Ray Serve tells them.
"""

from __future__ import annotations

from ray.serve import request_router  # pyright: ignore[reportMissingImports]

from jdllm.replicas import running_names


class TargetRouter(request_router.RequestRouter):
    """Sends a call to the replica that its keyword argument `target` names."""

    async def choose_replicas(
        self,
        candidate_replicas: list[request_router.RunningReplica],
        pending_request: request_router.PendingRequest | None = None,
    ) -> list[list[request_router.RunningReplica]]:
        """Returns the named replica; without a name, or if it is gone, all of them."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            target = pending_request.kwargs.get("target")
            named = [one for one in candidate_replicas if one.replica_id.unique_id == target]
            if named:
                return [named]
        return [candidate_replicas]

    def update_replicas(self, replicas: list[request_router.RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._note()

    def on_replica_actor_died(self, replica_id: request_router.ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._note()

    def _note(self) -> None:
        deployment = self._deployment_id
        running_names.RUNNING[deployment.app_name, deployment.name] = tuple(
            sorted(one.unique_id for one in self.curr_replicas)
        )
