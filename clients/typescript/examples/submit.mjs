// Submit a job, follow it to its end, and print what it printed and used.
import { randomUUID } from "node:crypto";
import { ApiError, Wattshift } from "@wattshift/client";

const wattshift = new Wattshift();
const job = await wattshift.post("/v1/jobs", {
  body: { name: "from-typescript", command: ["sh", "-c", "echo trained"], gpus: { min: 1 } },
  idempotencyKey: randomUUID(),
});
for await (const event of wattshift.events("/v1/jobs/{job_id}/events", { path: { job_id: job.id } })) {
  console.log(event.type);
}
const ended = await wattshift.get("/v1/jobs/{job_id}", { path: { job_id: job.id } });
const output = await wattshift.get("/v1/jobs/{job_id}/logs", { path: { job_id: job.id } });
console.log(JSON.stringify({ id: ended.id, state: ended.state, output, energy_j: ended.footprint.energy_j }));
try {
  await wattshift.post("/v1/jobs", { body: { name: "no-gpus", command: ["true"], gpus: { min: 0 } } });
} catch (error) {
  if (!(error instanceof ApiError)) throw error;
  console.log(error.status, error.code, error.message);
}
