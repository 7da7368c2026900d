"""Let two jobs share a GPU."""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """ALTER TABLE device_claims
             ADD COLUMN slot INTEGER NOT NULL DEFAULT 0 CONSTRAINT device_claims_slot CHECK (slot IN (0, 1)),
             ADD COLUMN packed BOOLEAN NOT NULL DEFAULT false"""
    )
    op.execute(
        """ALTER TABLE device_claims
             DROP CONSTRAINT device_claims_pkey,
             ADD CONSTRAINT device_claims_pkey PRIMARY KEY (node_id, device, slot)"""
    )
    # Claims are made under the lock of the scheduler's one row, so that no two transactions can miss each other's. A
    # release that knows of no packing claims slot 0, and gets no device that has a holder in either.
    op.execute(
        """CREATE FUNCTION refuse_claims_beside_others() RETURNS trigger LANGUAGE plpgsql AS $$
           DECLARE holders INTEGER;
           BEGIN
               SELECT count(*) INTO holders FROM device_claims WHERE node_id = NEW.node_id AND device = NEW.device;
               IF holders <> NEW.packed::int OR NEW.packed AND NEW.parent IS NOT NULL THEN
                   RAISE unique_violation USING
                       MESSAGE = format('device %s of node %s has %s holders', NEW.device, NEW.node_id, holders);
               END IF;
               RETURN NEW;
           END $$"""
    )
    op.execute(
        """CREATE TRIGGER device_claims_alone_or_packed BEFORE INSERT ON device_claims
           FOR EACH ROW EXECUTE FUNCTION refuse_claims_beside_others()"""
    )


def downgrade() -> None:
    # The release before counts on one holder per device: jobs that share one are to end or to be stopped first.
    op.execute(
        """DO $$ BEGIN
               IF EXISTS (SELECT FROM device_claims GROUP BY node_id, device HAVING count(*) > 1) THEN
                   RAISE EXCEPTION 'two jobs share a GPU: stop one of each pair first';
               END IF;
           END $$"""
    )
    op.execute("DROP TRIGGER device_claims_alone_or_packed ON device_claims")
    op.execute("DROP FUNCTION refuse_claims_beside_others()")
    op.execute(
        """ALTER TABLE device_claims
             DROP CONSTRAINT device_claims_pkey, ADD CONSTRAINT device_claims_pkey PRIMARY KEY (node_id, device)"""
    )
    op.execute("ALTER TABLE device_claims DROP COLUMN packed, DROP COLUMN slot")
