"""Tables of predicted lengths: trainings, the models they produced, and what was predicted for each job."""

from sqlalchemy import Index, Table

from services.db.metadata import metadata
from services.db.tables.work import LIVE, work_columns

length_trainings = Table(
    "length_trainings",
    metadata,
    *work_columns("length_trainings", "train_s"),
    Index("length_trainings_live", "state", postgresql_where=LIVE),
)
"""Work as the optimizer's workers claim it (``services.db.background``); only the installation itself submits it."""
