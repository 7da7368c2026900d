"""Keep what was reported beside what was booked, where hardware cannot have used it, and mark such lines.

``energy_usages.basis`` says why a line is not booked as reported (``contracts.nodes.Basis``; NULL: it is), and
``reported_energy_j`` what was reported of it where that differs; ``energy_intervals.reported_gpu_energy_j`` is the same
of an interval. ``nodes.most_gpu_w`` and ``most_host_w`` are what a node's GPUs and the rest of it can draw, and
``marked_intervals`` counts its intervals that have a marked line.
"""

from alembic import op

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE energy_usages ADD COLUMN basis TEXT, ADD COLUMN reported_energy_j DOUBLE PRECISION")
    op.execute("ALTER TABLE energy_intervals ADD COLUMN reported_gpu_energy_j DOUBLE PRECISION")
    op.execute(
        "ALTER TABLE nodes ADD COLUMN most_gpu_w DOUBLE PRECISION, ADD COLUMN most_host_w DOUBLE PRECISION, "
        "ADD COLUMN marked_intervals BIGINT NOT NULL DEFAULT 0"
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE nodes DROP COLUMN marked_intervals, DROP COLUMN most_host_w, DROP COLUMN most_gpu_w")
    op.execute("ALTER TABLE energy_intervals DROP COLUMN reported_gpu_energy_j")
    op.execute("ALTER TABLE energy_usages DROP COLUMN reported_energy_j, DROP COLUMN basis")
