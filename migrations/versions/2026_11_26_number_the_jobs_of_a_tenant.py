"""Number the jobs and arrays of a tenant, as ids that people type. What had ended before has no number."""

from alembic import op

revision = "0059"
down_revision = "0058"
branch_labels = None
depends_on = None

LIVE = "state NOT IN ('succeeded', 'failed', 'cancelled')"
NUMBER = f"""
WITH live AS (
    SELECT id, tenant_id, submitted_at FROM jobs WHERE array_id IS NULL AND {LIVE}
    UNION ALL
    SELECT id, tenant_id, submitted_at FROM job_arrays a
    WHERE EXISTS (SELECT FROM jobs j WHERE j.array_id = a.id AND {LIVE})
),
numbered AS (
    SELECT id, tenant_id, row_number() OVER (PARTITION BY tenant_id ORDER BY submitted_at, id) AS number FROM live
),
single AS (UPDATE jobs SET number = n.number FROM numbered n WHERE jobs.id = n.id),
arrays AS (UPDATE job_arrays SET number = n.number FROM numbered n WHERE job_arrays.id = n.id),
tasks AS (UPDATE jobs SET number = n.number FROM numbered n WHERE jobs.array_id = n.id)
UPDATE tenants SET last_number = n.last
FROM (SELECT tenant_id, max(number) AS last FROM numbered GROUP BY 1) n WHERE tenants.id = n.tenant_id
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE tenants ADD COLUMN last_number BIGINT DEFAULT 0 NOT NULL")
    op.execute("ALTER TABLE jobs ADD COLUMN number BIGINT")
    op.execute("ALTER TABLE job_arrays ADD COLUMN number BIGINT")
    op.execute(NUMBER)
    op.execute("CREATE UNIQUE INDEX jobs_numbered ON jobs (tenant_id, number) WHERE array_id IS NULL")
    op.execute("CREATE UNIQUE INDEX job_arrays_numbered ON job_arrays (tenant_id, number)")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE job_arrays DROP COLUMN number")
    op.execute("ALTER TABLE jobs DROP COLUMN number")
    op.execute("ALTER TABLE tenants DROP COLUMN last_number")
