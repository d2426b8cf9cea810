// The table with the names of heads, on a page of its own.
headTable(byId("heads-table"), byId("heads-filters"), { functions: dataOf("names-data") });
byId("heads-filters").hidden = false;
