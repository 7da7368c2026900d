"""Cut GPUs into slices."""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE device_claims ADD COLUMN uuid TEXT, ADD COLUMN parent INTEGER, ADD COLUMN profile TEXT")
    # All devices so far are whole GPUs. A node that registered without one that is claimed leaves its UUID unknown.
    op.execute(
        """UPDATE device_claims c SET uuid = d ->> 'uuid'
             FROM nodes n, jsonb_array_elements(n.devices) d
            WHERE n.id = c.node_id AND (d ->> 'index')::int = c.device"""
    )
    op.execute("CREATE INDEX device_claims_of_slices ON device_claims (node_id, parent) WHERE parent IS NOT NULL")
    # Claims are made under the lock of the scheduler's one row, so that no two transactions can miss each other's.
    op.execute(
        """CREATE FUNCTION refuse_claims_on_slice_and_gpu() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN
               IF NEW.parent IS NULL
                  AND EXISTS (SELECT FROM device_claims WHERE node_id = NEW.node_id AND parent = NEW.device)
                  OR NEW.parent IS NOT NULL
                  AND EXISTS (SELECT FROM device_claims
                               WHERE node_id = NEW.node_id AND device = NEW.parent AND parent IS NULL)
               THEN
                   RAISE unique_violation USING
                       MESSAGE = format('GPU %s of node %s is held as a whole or by its slices, not both',
                                        coalesce(NEW.parent, NEW.device), NEW.node_id);
               END IF;
               RETURN NEW;
           END $$"""
    )
    op.execute(
        """CREATE TRIGGER device_claims_slice_or_gpu BEFORE INSERT ON device_claims
           FOR EACH ROW EXECUTE FUNCTION refuse_claims_on_slice_and_gpu()"""
    )
    op.execute(
        """CREATE TABLE gpu_partitions (
            node_id TEXT NOT NULL,
            gpu INTEGER NOT NULL,
            revision BIGINT NOT NULL,
            sizes JSONB NOT NULL,
            owner TEXT,
            state TEXT NOT NULL DEFAULT 'pending',
            detail TEXT NOT NULL DEFAULT '',
            wanted_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            applied_at TIMESTAMPTZ,
            PRIMARY KEY (node_id, gpu),
            CONSTRAINT gpu_partitions_state CHECK (state IN ('pending', 'busy', 'applied', 'failed'))
        )"""
    )
    op.execute("CREATE INDEX gpu_partitions_by_owner ON gpu_partitions (owner) WHERE owner IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP TABLE gpu_partitions")
    op.execute("DROP TRIGGER device_claims_slice_or_gpu ON device_claims")
    op.execute("DROP FUNCTION refuse_claims_on_slice_and_gpu()")
    op.execute("DROP INDEX device_claims_of_slices")
    op.execute("ALTER TABLE device_claims DROP COLUMN uuid, DROP COLUMN parent, DROP COLUMN profile")
