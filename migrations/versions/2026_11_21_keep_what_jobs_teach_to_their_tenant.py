"""Keep what jobs teach to their tenant."""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# A kind that users named is "tenant/label" from here on; one that is a job's own has no slash. Profiles are fitted
# again from their points.


def upgrade() -> None:
    for table in ("setting_measurements", "setting_points"):
        op.execute(
            f"UPDATE {table} t SET kind = j.tenant_id || '/' || t.kind FROM jobs j "
            "WHERE j.id = t.job_id AND t.kind <> j.id"
        )
    op.execute("DELETE FROM setting_profiles f WHERE NOT EXISTS (SELECT FROM setting_points p WHERE p.kind = f.kind)")


def downgrade() -> None:
    op.execute(
        "DELETE FROM setting_points p USING setting_points q "
        "WHERE strpos(p.kind, '/') > 0 AND strpos(q.kind, '/') > 0 "
        "AND (q.measured_at, q.kind) > (p.measured_at, p.kind) "
        "AND (substr(p.kind, strpos(p.kind, '/') + 1), p.gpu_model, p.setting, p.gpus, p.nodes, p.local_batch, p.value)"
        " = (substr(q.kind, strpos(q.kind, '/') + 1), q.gpu_model, q.setting, q.gpus, q.nodes, q.local_batch, q.value)"
    )
    for table in ("setting_measurements", "setting_points"):
        op.execute(f"UPDATE {table} SET kind = substr(kind, strpos(kind, '/') + 1) WHERE strpos(kind, '/') > 0")
    op.execute("DELETE FROM setting_profiles f WHERE NOT EXISTS (SELECT FROM setting_points p WHERE p.kind = f.kind)")
