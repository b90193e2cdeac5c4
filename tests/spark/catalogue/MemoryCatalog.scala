// A catalogue of tables in memory, for tests: what Spark asks of a table format, and nothing else.
// Tables are atomic, as those of Delta Lake and Iceberg are: a write is seen when it is committed.
// Settings of the catalogue: `merges=false` makes tables without row-level operations; `sorts`
// names a column by which rows are to be sorted, for which Spark runs what computes them twice.
// In a table whose name has `contested` in it, each merge loses against a write of another job.

package tests

import java.util
import java.util.concurrent.ConcurrentHashMap

import scala.collection.mutable.ArrayBuffer

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.analysis.{NoSuchTableException, TableAlreadyExistsException}
import org.apache.spark.sql.catalyst.expressions.{BoundReference, UnsafeProjection}
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.distributions.{Distribution, Distributions}
import org.apache.spark.sql.connector.expressions.{Expressions, SortDirection, SortOrder, Transform}
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

class MemoryCatalog extends TableCatalog {
  private val tables = new ConcurrentHashMap[Identifier, MemoryTable]
  private var catalogue = ""
  private var merges = true
  private var sorts = ""

  override def initialize(name: String, options: CaseInsensitiveStringMap): Unit = {
    catalogue = name
    merges = options.getBoolean("merges", true)
    sorts = options.getOrDefault("sorts", "")
  }

  override def name(): String = catalogue

  override def capabilities(): util.Set[TableCatalogCapability] =
    util.EnumSet.of(TableCatalogCapability.SUPPORT_COLUMN_DEFAULT_VALUE)

  override def listTables(namespace: Array[String]): Array[Identifier] =
    tables.keySet.toArray(Array.empty[Identifier]).filter(_.namespace.sameElements(namespace))

  override def loadTable(ident: Identifier): Table = {
    val found = tables.get(ident)
    if (found == null) throw new NoSuchTableException(ident)
    found
  }

  override def createTable(
      ident: Identifier,
      schema: StructType,
      partitions: Array[Transform],
      properties: util.Map[String, String]): Table = {
    val order = Option(sorts).filter(schema.fieldNames.contains)
    val made =
      if (merges) new MergingTable(ident.toString, schema, order)
      else new MemoryTable(ident.toString, schema, order)
    if (tables.putIfAbsent(ident, made) != null) throw new TableAlreadyExistsException(ident)
    made
  }

  override def alterTable(ident: Identifier, changes: TableChange*): Table =
    throw new UnsupportedOperationException("alter")

  override def dropTable(ident: Identifier): Boolean = tables.remove(ident) != null

  override def renameTable(from: Identifier, to: Identifier): Unit =
    throw new UnsupportedOperationException("rename")
}

class MemoryTable(title: String, columnsOf: StructType, order: Option[String])
    extends SupportsRead with SupportsWrite {
  private var rows: Array[InternalRow] = Array.empty

  def read: Array[InternalRow] = synchronized(rows)

  def write(more: Array[InternalRow], replace: Boolean): Unit =
    synchronized { rows = if (replace) more else rows ++ more }

  override def name(): String = title
  override def schema(): StructType = columnsOf

  override def capabilities(): util.Set[TableCapability] =
    util.EnumSet.of(
      TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.TRUNCATE)

  override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder = new MemoryScan(this)

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder =
    if (order.isEmpty) new MemoryWrite(this, false) else new SortedWrite(this, false, order.get)
}

class MergingTable(title: String, columnsOf: StructType, order: Option[String])
    extends MemoryTable(title, columnsOf, order)
    with SupportsRowLevelOperations {
  override def newRowLevelOperationBuilder(info: RowLevelOperationInfo): RowLevelOperationBuilder =
    new RowLevelOperationBuilder {
      override def build(): RowLevelOperation = new RowLevelOperation {
        override def command(): RowLevelOperation.Command = info.command
        override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder =
          new MemoryScan(MergingTable.this)
        // All that has been read is written again: the whole table.
        override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder =
          new MemoryWrite(MergingTable.this, true) {
            override def commit(messages: Array[WriterCommitMessage]): Unit = {
              if (title.contains("contested"))
                throw new util.ConcurrentModificationException("another job has written")
              super.commit(messages)
            }
          }
      }
    }
}

class MemoryScan(table: MemoryTable) extends ScanBuilder with Scan with Batch {
  override def build(): Scan = this
  override def readSchema(): StructType = table.schema
  override def toBatch: Batch = this

  override def planInputPartitions(): Array[InputPartition] = Array(Rows(table.read))

  override def createReaderFactory(): PartitionReaderFactory = new Readers
}

case class Rows(rows: Array[InternalRow]) extends InputPartition with WriterCommitMessage

class Readers extends PartitionReaderFactory {
  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    new PartitionReader[InternalRow] {
      private val rows = partition.asInstanceOf[Rows].rows
      private var at = -1
      override def next(): Boolean = { at += 1; at < rows.length }
      override def get(): InternalRow = rows(at)
      override def close(): Unit = ()
    }
}

class MemoryWrite(table: MemoryTable, replace: Boolean)
    extends WriteBuilder with SupportsTruncate with Write with BatchWrite {
  override def truncate(): WriteBuilder = new MemoryWrite(table, true)
  override def build(): Write = this
  override def toBatch: BatchWrite = this

  override def createBatchWriterFactory(info: PhysicalWriteInfo): DataWriterFactory =
    new Writers(table.schema)

  override def commit(messages: Array[WriterCommitMessage]): Unit =
    table.write(messages.flatMap(_.asInstanceOf[Rows].rows), replace)

  override def abort(messages: Array[WriterCommitMessage]): Unit = ()
}

class SortedWrite(table: MemoryTable, replace: Boolean, column: String)
    extends MemoryWrite(table, replace) with RequiresDistributionAndOrdering {
  private val order = Array(Expressions.sort(Expressions.column(column), SortDirection.ASCENDING))
  override def truncate(): WriteBuilder = new SortedWrite(table, true, column)
  override def requiredDistribution(): Distribution = Distributions.ordered(order)
  override def requiredOrdering(): Array[SortOrder] = order
}

class Writers(columns: StructType) extends DataWriterFactory {
  override def createWriter(partition: Int, task: Long): DataWriter[InternalRow] =
    new DataWriter[InternalRow] {
      private val rows = ArrayBuffer.empty[InternalRow]
      private var wide = columns.length
      private var values = of(0)
      override def write(row: InternalRow): Unit = {
        if (row.numFields != wide) {
          // In a merge, Spark 4.1 leaves the number of the operation before the columns.
          wide = row.numFields
          values = of(wide - columns.length)
        }
        rows += values(row).copy()
      }
      private def of(before: Int) = UnsafeProjection.create(columns.zipWithIndex.map {
        case (column, at) => BoundReference(before + at, column.dataType, column.nullable)
      })
      override def commit(): WriterCommitMessage = Rows(rows.toArray)
      override def abort(): Unit = ()
      override def close(): Unit = ()
    }
}
