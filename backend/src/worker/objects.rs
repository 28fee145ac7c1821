//! Which RM objects a free takes along.
//!
//! RM frees children with their parent and everything with its client
//! (`serverFreeResourceTree` of the resource server). We keep the tree for one
//! purpose: a placement must leave the window before its memory goes.

use std::collections::hash_map::Entry;
use std::collections::HashMap;

/// Deeper than any chain of parents that RM makes.
const MAX_DEPTH: usize = 32;

/// The tree of every client of this process.
#[derive(Debug, Default)]
pub struct Objects {
    parents: HashMap<(u32, u32), u32>,
    /// How many objects each has below it: most that are freed have none.
    children: HashMap<(u32, u32), u32>,
    owners: HashMap<u32, u32>,
    /// Clients and objects that calls under way will make.
    expected: (usize, usize),
}

impl Objects {
    /// `client` was made on `file`, which owns it.
    pub fn client(&mut self, client: u32, file: u32) {
        self.owners.insert(client, file);
    }

    /// `object` was made below `parent`.
    pub fn made(&mut self, client: u32, object: u32, parent: u32) {
        self.forget(client, object);
        self.parents.insert((client, object), parent);
        *self.children.entry((client, parent)).or_default() += 1;
    }

    fn forget(&mut self, client: u32, object: u32) {
        let Some(parent) = self.parents.remove(&(client, object)) else { return };
        if let Entry::Occupied(mut count) = self.children.entry((client, parent)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// The file that `client` was made on.
    pub fn owner(&self, client: u32) -> Option<u32> {
        self.owners.get(&client).copied()
    }

    /// Whether `object` was made and is not gone.
    pub fn knows(&self, client: u32, object: u32) -> bool {
        self.parents.contains_key(&(client, object))
    }

    /// Whether freeing `freed` takes `object` along.
    pub fn goes_with(&self, client: u32, object: u32, freed: u32) -> bool {
        let parents = |object: &u32| self.parents.get(&(client, *object)).copied();
        freed == client
            || std::iter::successors(Some(object), parents).take(MAX_DEPTH).any(|o| o == freed)
    }

    /// `freed` is gone, and what went with it.
    pub fn freed(&mut self, client: u32, freed: u32) {
        if freed == client {
            self.owners.remove(&client);
            self.parents.retain(|&(owner, _), _| owner != client);
            self.children.retain(|&(owner, _), _| owner != client);
            return;
        }
        if !self.children.contains_key(&(client, freed)) {
            return self.forget(client, freed);
        }
        let gone: Vec<u32> = self
            .parents
            .keys()
            .filter(|&&(owner, object)| owner == client && self.goes_with(client, object, freed))
            .map(|&(_, object)| object)
            .collect();
        for object in gone {
            self.forget(client, object);
        }
    }

    /// The clients of `file` are gone with it.
    pub fn closed(&mut self, file: u32) {
        let clients: Vec<u32> = self
            .owners
            .iter()
            .filter_map(|(&client, &owner)| (owner == file).then_some(client))
            .collect();
        for client in clients {
            self.freed(client, client);
        }
    }

    /// A call will make a client or an object; how many there are with it.
    pub fn expect(&mut self, client: bool) -> u64 {
        *self.expected(client) += 1;
        let (clients, objects) = self.count();
        let have = if client { clients } else { objects };
        (have + *self.expected(client)) as u64
    }

    /// The call is over, whatever came of it.
    pub fn expected_no_more(&mut self, client: bool) {
        *self.expected(client) -= 1;
    }

    fn expected(&mut self, client: bool) -> &mut usize {
        if client {
            &mut self.expected.0
        } else {
            &mut self.expected.1
        }
    }

    /// Clients and objects alive, for limits and tallies.
    pub fn count(&self) -> (usize, usize) {
        (self.owners.len(), self.parents.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Objects {
        let mut objects = Objects::default();
        objects.client(1, 0x1_0001);
        objects.made(1, 10, 1);
        objects.made(1, 20, 10);
        objects.made(1, 30, 20);
        objects.made(1, 40, 10);
        objects
    }

    #[test]
    fn a_free_takes_along_what_is_below_and_nothing_else() {
        let objects = tree();
        assert!(objects.goes_with(1, 30, 20));
        assert!(objects.goes_with(1, 30, 10));
        assert!(objects.goes_with(1, 30, 1));
        assert!(!objects.goes_with(1, 40, 20));
        assert!(!objects.goes_with(2, 30, 20));
    }

    #[test]
    fn what_was_freed_is_forgotten_with_all_below_it() {
        let mut objects = tree();
        objects.freed(1, 20);
        assert_eq!(objects.count(), (1, 2));
        objects.freed(1, 40);
        assert_eq!(objects.count(), (1, 1));
        objects.closed(0x1_0001);
        assert_eq!(objects.count(), (0, 0));
        assert!(objects.children.is_empty());
    }

    #[test]
    fn a_cycle_of_parents_ends() {
        let mut objects = Objects::default();
        objects.made(1, 10, 11);
        objects.made(1, 11, 10);
        assert!(!objects.goes_with(1, 10, 99));
    }
}
